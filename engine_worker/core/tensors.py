"""Tensors for clients: which rows a step keeps, which sequences may compute rows now, and messages with the rows.

A row is sent once: after preemption or a resume, cached blocks are reused up to the first row that was not sent. The
rows of a prompt are kept for one of the request's sequences, its `prompt_rows_owner`.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from engine_worker.request import Request, Sequence, State
from engine_worker.step import LOGITS, NO_LIMIT, Kept, KeptRows
from sluice.wire import tensors
from sluice.wire.requests import Submit
from sluice.wire.tensors import TensorRows


def sources(names: tuple[str, ...]) -> tuple[str, ...]:
    """The runner's names of the tensors that clients call `names`, without duplicates."""
    return tuple(dict.fromkeys(map(source_of, names)))


def source_of(name: str) -> str:
    return LOGITS if name in tensors.LOGITS_NAMES else name


def kept_rows(sequence: Sequence, num_tokens: int) -> tuple[Kept, ...]:
    """The rows of the next `num_tokens` tokens that the client has requested and that were not sent: first the
    prompt's, then the output's."""
    request, start = sequence.request, sequence.num_scheduled
    params, end, kept = request.tensors, start + num_tokens, []
    if params.context and sequence is request.prompt_rows_owner:
        first, last = max(start, request.num_context_rows), min(end, request.num_prompt)
        if first < last:
            kept.append(Kept(first, last - first, sources(params.context), True))
    if params.output:
        first = max(start, request.num_prompt - 1 + _sent_to_all(sequence))
        if first < end:
            kept.append(Kept(first, end - first, sources(params.output), False))
    return tuple(kept)


def _sent_to_all(sequence: Sequence) -> int:
    """Rows of the output that were sent for this sequence and for all siblings that sample their first token with
    it."""
    if sequence.output:
        return sequence.num_rows
    return min([sequence.num_rows, *(sibling.num_rows for sibling in sequence.request.awaiting())])


def tensor_messages(
    sequence: Sequence, samplers: tuple[Sequence, ...], kept: tuple[Kept, ...], rows: list[list[KeptRows]]
) -> Iterator[TensorRows]:
    """Messages with the rows of one slice, for all sequences that share them. Advances the counts of sent rows."""
    request = sequence.request
    for positions, arrays in zip(kept, rows, strict=True):
        end = positions.start + positions.count
        if positions.context:
            # If their owner ended while its step was in flight, the next one may have computed the same rows.
            for part in _messages(request, 0, request.tensors.context, arrays, context=True):
                if request.num_context_rows < part.end:
                    yield part.between(max(request.num_context_rows, part.start), part.end)
            request.num_context_rows = max(request.num_context_rows, end)
            continue
        first = request.num_prompt - 1
        outputs = [each._replace(start=each.start - first) for each in arrays]
        for sampler in dict.fromkeys((sequence, *samplers)):
            if sampler.state is State.ENDED:
                continue
            # Siblings share only the row of the prompt's last position.
            num_sent, last = sampler.num_rows, end - first if sampler is sequence else 1
            for part in _messages(request, sampler.index, request.tensors.output, outputs, context=False):
                if num_sent < part.end and part.start < last:
                    yield part.between(max(num_sent, part.start), min(last, part.end))
            sampler.num_rows = max(num_sent, last)


@dataclass(eq=False)
class TensorGate:
    """Limits the rows that sequences may compute to the room on the lanes to their routers, taking turns."""

    _requests: OrderedDict[Request, None]
    """Those with tensors; reordered here."""
    _row_bytes: Mapping[str, int]
    """See `Runner.tensors`."""
    _room: Callable[[Submit], int]
    """See `Hooks.tensor_room`."""
    _in_flight: int = 0
    """Bytes of the rows of in-flight steps."""

    def launched(self, kept: list[Kept]) -> None:
        """A step that keeps these rows was launched."""
        self._in_flight += self._size(kept)

    def collected(self, kept: list[Kept]) -> None:
        """That step was collected, and its rows were added to the responses or dropped."""
        self._in_flight -= self._size(kept)

    def update(self) -> None:
        """Set how far each sequence may be computed; call before scheduling. Holders of memory come first, because the
        others may have to wait for memory too."""
        if not self._requests:
            return
        for request in [request for request in self._requests if not request.num_live]:
            del self._requests[request]
        reserved = self._in_flight
        for holding in (True, False):
            for request in list(self._requests):
                room = self._room(request.submit)
                # While nothing else is in flight one row is allowed, however large it is.
                least = int(room > 0 and not reserved)
                allowed = self._allow(request, max(0, room - reserved), least, holding)
                if allowed and holding:
                    # It has had its turn: it comes last in the next step.
                    self._requests.move_to_end(request)
                reserved += allowed

    def _allow(self, request: Request, room: int, least: int, holding: bool) -> int:
        """Distribute `room` bytes among the request's sequences that hold memory, or those that do not; returns the
        bytes of the allowed rows. `least`: rows that the first sequence is allowed in any case."""
        used = 0
        for sequence in request.sequences:
            if bool(sequence.blocks) is not holding:
                continue
            size = self._bytes_per_position(request, sequence)
            if not size:
                sequence.allowed, sequence.due = NO_LIMIT, True
                continue
            start = sequence.num_scheduled
            rows = max((room - used) // size, 0 if used else least)
            sequence.allowed = max(sequence.first_unsent, start) + rows
            sequence.due = sequence.allowed > start
            used += min(rows, sequence.num_pending) * size
        return used

    def _size(self, kept: list[Kept]) -> int:
        return sum(positions.count * self._row_bytes[name] for positions in kept for name in positions.names)

    def _bytes_per_position(self, request: Request, sequence: Sequence) -> int:
        params = request.tensors
        names = sources(params.output)
        if sequence is request.prompt_rows_owner and request.num_context_rows < request.num_prompt:
            names += sources(params.context)
        return sum(self._row_bytes[name] for name in names)


def _messages(
    request: Request, index: int, names: tuple[str, ...], arrays: list[KeptRows], *, context: bool
) -> Iterator[TensorRows]:
    """The rows under the names that the client has requested: several names can have the same source."""
    submit = request.submit
    for name in names:
        source = source_of(name)
        for rows in arrays:
            if rows.name == source:
                yield TensorRows(
                    submit.request, submit.attempt, index, name, context, rows.start, rows.shape, rows.dtype, rows.data
                )
