"""Tensors for clients: which rows a step keeps, which sequences may compute rows now, and rows as messages.

A row that has been sent is not computed again: after a pause or a resume reuse of cached blocks ends where the first
missing row is. A prompt's rows are kept by one of the request's sequences.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping

from engine_worker.request import Request
from engine_worker.sequence import NO_LIMIT, Sequence, State
from engine_worker.step import LOGITS, Kept, KeptRows
from sluice.ring import tensors
from sluice.ring.tensors import TensorRows
from sluice.ring.wire import Submit


def sources(names: tuple[str, ...]) -> tuple[str, ...]:
    """The runner's names of tensors."""
    return tuple(dict.fromkeys(map(source_of, names)))


def source_of(name: str) -> str:
    return LOGITS if name in tensors.LOGITS_NAMES else name


def kept_rows(sequence: Sequence, num_tokens: int) -> tuple[Kept, ...]:
    """What of the next `num_tokens` tokens has rows that are wanted and were not sent: of the prompt, of the output."""
    request, start = sequence.request, sequence.num_scheduled
    params, end, found = request.spec.tensors, start + num_tokens, []
    if params.context and sequence is request.keeper:
        first, last = max(start, request.num_context_rows), min(end, request.num_prompt)
        if first < last:
            found.append(Kept(first, last - first, sources(params.context), True))
    if params.output:
        first = max(start, request.num_prompt - 1 + _sent_to_all(sequence))
        if first < end:
            found.append(Kept(first, end - first, sources(params.output), False))
    return tuple(found)


def _sent_to_all(sequence: Sequence) -> int:
    """Rows of the output that this sequence has, and those which draw their first token with it."""
    if sequence.output:
        return sequence.num_rows
    return min([sequence.num_rows, *(sibling.num_rows for sibling in sequence.request.awaiting())])


def tensor_messages(
    sequence: Sequence, samplers: tuple[Sequence, ...], kept: tuple[Kept, ...], rows: list[list[KeptRows]]
) -> Iterator[TensorRows]:
    """The rows of one slice, for all whose rows they are; notes that they are sent."""
    request = sequence.request
    for wanted, found in zip(kept, rows, strict=True):
        end = wanted.start + wanted.count
        if wanted.context:
            # A keeper that ended while its step ran may have been followed by another from the same row on.
            for part in _messages(request, 0, request.spec.tensors.context, found, context=True):
                if request.num_context_rows < part.end:
                    yield part.between(max(request.num_context_rows, part.start), part.end)
            request.num_context_rows = max(request.num_context_rows, end)
            continue
        first = request.num_prompt - 1
        outputs = [each._replace(start=each.start - first) for each in found]
        for sampler in dict.fromkeys((sequence, *samplers)):
            if sampler.state is State.ENDED:
                continue
            # The others share the prompt only, so the row of its last position.
            known, last = sampler.num_rows, end - first if sampler is sequence else 1
            for part in _messages(request, sampler.index, request.spec.tensors.output, outputs, context=False):
                if known < part.end and part.start < last:
                    yield part.between(max(known, part.start), min(last, part.end))
            sampler.num_rows = max(known, last)


class TensorGate:
    """Lets as many rows be computed as there is room for on the way to their routers; who had its turn goes last."""

    def __init__(
        self, requests: OrderedDict[Request, None], row_bytes: Mapping[str, int], room: Callable[[Submit], int]
    ) -> None:
        """`requests`: those that want tensors. `row_bytes`: see `Runner.tensors`. `room`: see `Hooks.tensor_room`."""
        self._row_bytes = row_bytes
        self._room = room
        self._requests = requests
        self._in_flight = 0
        """Bytes of rows that launched steps bring."""

    def launched(self, kept: tuple[Kept, ...]) -> None:
        """A step with these rows."""
        self._in_flight += self._size(kept)

    def collected(self, kept: tuple[Kept, ...]) -> None:
        """The same, later: its rows are on their way, or dropped."""
        self._in_flight -= self._size(kept)

    def update(self) -> None:
        """Before scheduling: how far each sequence may be computed. Holders of memory come first: the others may have
        to wait for that too."""
        if not self._requests:
            return
        for request in [each for each in self._requests if not each.num_live]:
            del self._requests[request]
        taken = self._in_flight
        for holding in (True, False):
            for request in list(self._requests):
                room = self._room(request.spec)
                # Nothing else is on its way, so one row may be, however large it is.
                least = int(room > 0 and not taken)
                used = self._allow(request, max(0, room - taken), least, holding)
                if used and holding:
                    self._requests.move_to_end(request)
                taken += used

    def _allow(self, request: Request, room: int, least: int, holding: bool) -> int:
        """For the sequences that hold memory, or those that do not; returns the bytes that they may bring. `least`:
        rows of the first one."""
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

    def _size(self, kept: tuple[Kept, ...]) -> int:
        return sum(each.count * self._row_bytes[name] for each in kept for name in each.names)

    def _bytes_per_position(self, request: Request, sequence: Sequence) -> int:
        params = request.spec.tensors
        names = sources(params.output)
        if sequence is request.keeper and request.num_context_rows < request.num_prompt:
            names += sources(params.context)
        return sum(self._row_bytes[name] for name in names)


def _messages(
    request: Request, index: int, names: tuple[str, ...], found: list[KeptRows], *, context: bool
) -> Iterator[TensorRows]:
    spec = request.spec
    for name in names:
        source = source_of(name)
        for rows in found:
            if rows.name == source:
                yield TensorRows(
                    spec.request, spec.attempt, index, name, context, rows.start, rows.shape, rows.dtype, rows.data
                )
