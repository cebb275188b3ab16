"""Lanes in memory, and a receiver of rows that fails on repetitions, gaps and second terminal rows."""

from sluice.wire.heartbeats import KeepAlive
from sluice.wire.message import Message
from sluice.wire.prompt_logprobs import Row, unpack
from sluice.wire.rows import End, Open, TokenBatch, TokenRow
from sluice.wire.tensors import TensorBatch, TensorRows
from tests.fakes.rows import rows_of


class MemoryLane:
    """A lane that accepts every message unless a test marks it as full or not open."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.full = False
        self.open = True
        self.closed = False
        self.refused_at: float | None = None
        self.messages: list[Message] = []

    def ready(self) -> bool:
        return self.open and not self.full

    def hung_up(self) -> bool:
        return self.refused_at is not None

    def send(self, message: Message) -> bool:
        if self.full or not self.open:
            return False
        self.messages.append(message)
        return True

    def close(self, linger: float = 0.0) -> None:
        self.closed = True


class Stream:
    """What a detokenizer has received of one sequence."""

    def __init__(self, resumed=()) -> None:
        self.tokens: list[int] = [*resumed]
        self.resumed = len(self.tokens)
        self.logprobs: list = []
        self.accepted = 0
        """Number of accepted draft tokens."""
        self.rows: list[TokenRow] = []
        self.end: End | None = None


class Receiver:
    """Reads the messages of memory lanes as a detokenizer would."""

    def __init__(self) -> None:
        self.lanes: dict[str, MemoryLane] = {}
        self.opens: dict[tuple[int, int], Open] = {}
        self.streams: dict[tuple[int, int, int], Stream] = {}
        self.prompt_logprobs: dict[tuple[int, int], list[Row]] = {}
        """Rows received so far, by request and attempt."""
        self.lanes_open = True
        """Whether new lanes are open; False: as if no file descriptor were left."""
        self.tensors: dict[tuple[int, int, int, str, bool], list[TensorRows]] = {}
        """Parts received so far, by request, attempt, sequence, tensor name, and whether the rows are the prompt's."""
        self.first_rows: dict[tuple[int, int, int, bool], int] = {}
        """The first row to be sent if it is not 0, by request, attempt, sequence, and whether it is the prompt's."""
        self.keep_alives = 0
        self.batches = 0

    def open_lane(self, address: str) -> MemoryLane:
        if "://" not in address:
            raise ValueError(address)
        self.lanes[address] = MemoryLane(address)
        self.lanes[address].open = self.lanes_open
        return self.lanes[address]

    def read(self) -> None:
        for lane in self.lanes.values():
            for message in lane.messages:
                if isinstance(message, KeepAlive):
                    self.keep_alives += 1
                elif isinstance(message, TensorBatch):
                    for rows in message.parts:
                        self._receive_tensor(rows)
                else:
                    self._receive(message)
            lane.messages.clear()

    def _receive_tensor(self, rows: TensorRows) -> None:
        request, attempt, sequence, context = rows.request, rows.attempt, rows.sequence, rows.context
        first = self.first_rows.get((request, attempt, sequence, context), 0)
        parts = self.tensors.setdefault((request, attempt, sequence, rows.name, context), [])
        assert rows.start == (parts[-1].end if parts else first), f"row {rows.start} of {rows.name} is out of order"
        parts.append(rows)

    def _receive(self, batch: TokenBatch) -> None:
        self.batches += 1
        for opened in batch.opens:
            key = (opened.request, opened.attempt)
            assert key not in self.opens, f"{key} opened twice"
            self.opens[key] = opened
            for sequence in set(range(opened.n)).difference(opened.ended):
                self.streams[*key, sequence] = Stream(opened.resume.get(sequence, ()))
        for part in batch.prompt_logprobs:
            rows = self.prompt_logprobs.setdefault((part.request, part.attempt), [])
            assert part.start == len(rows), f"{part} after {len(rows)} rows"
            assert (part.request, part.attempt) in self.opens
            rows += unpack(part.data, part.top)
        for row in rows_of(batch):
            stream = self.streams[row.request, row.attempt, row.sequence]
            assert stream.end is None, f"{row} after its terminal row"
            assert row.offset == len(stream.tokens), f"{row} after {len(stream.tokens)} tokens"
            stream.rows.append(row)
            stream.tokens += row.tokens
            stream.logprobs += row.logprobs
            stream.accepted += row.accepted
            stream.end = row.end
