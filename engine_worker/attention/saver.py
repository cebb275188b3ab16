"""Copies blocks from the device to the host while the device computes."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count, groupby
from typing import Final, Protocol

import torch
from torch import Tensor

STAGING_BYTES: Final = 64 << 20
"""Device memory in which the parts of blocks are gathered, at most, if one block takes no more."""
Pair = tuple[int, int]
"""(device block, host block)."""
NoteSum = Callable[[int, int], None]
"""Called with a host block that has received a copy, and the sum of its words of 8 bytes."""


class Queued(Protocol):
    """Work in the side stream."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Let this thread wait."""

    def hold_back(self) -> None:
        """Let work that is queued on the current stream from now on wait; this thread goes on."""


class SideStream(Protocol):
    """A second stream of a device."""

    def queue(self, work: Callable[[], None]) -> Queued:
        """Queue work that begins once everything that is queued on the current stream now is done."""


class _Done:
    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def hold_back(self) -> None:
        pass


class Inline:
    """The stand-in for a device without streams: works immediately."""

    def queue(self, work: Callable[[], None]) -> Queued:
        work()
        return _Done()


def side_stream(device: torch.device) -> SideStream:
    return CudaSideStream(device) if device.type == "cuda" else Inline()


class _CudaQueued:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        # Blocking, because a thread that spins takes a core that router and detokenizer may need.
        self._event = torch.cuda.Event(blocking=True)
        self._event.record(stream)
        self._device = stream.device

    def done(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        self._event.synchronize()

    def hold_back(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class CudaSideStream:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def queue(self, work: Callable[[], None]) -> Queued:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        return _CudaQueued(self._stream)


class Saved:
    """Copies that have begun."""

    def __init__(self, queued: Queued, targets: Sequence[int], sums: Sequence[Tensor], note_sum: NoteSum) -> None:
        self._queued = queued
        self._targets = targets
        self._sums = sums
        self._note_sum = note_sum

    def land(self) -> None:
        """Wait until the copies are on the host, and note their sums. May be called in any thread."""
        self._queued.wait()
        if self._sums:
            totals = torch.cat(list(self._sums)).tolist()
            for target, total in zip(self._targets, totals, strict=True):
                # The words have no sign.
                self._note_sum(target, total % (1 << 64))


class BlockSaver:
    """Copies blocks in a side stream: per step a few large operations instead of several per block.

    The parts of some blocks are gathered in contiguous memory of the device, and copied from there. Until a copy has
    been made, neither its source nor its target may be written: call `join` before anything else of a step is queued.
    """

    def __init__(
        self,
        blocks: Tensor,
        host_blocks: Tensor,
        side: SideStream,
        note_sum: NoteSum,
        staging_bytes: int = STAGING_BYTES,
    ) -> None:
        """blocks: [2, num_layers, num_blocks, tokens_per_block, kv_heads, head_dim]; host_blocks: [num_host_blocks, 2,
        num_layers, tokens_per_block, kv_heads, head_dim]."""
        self._side = side
        self._note_sum = note_sum
        # Words of 8 bytes are gathered faster than elements, and added up.
        self._has_words = blocks[0, 0, 0, 0].nbytes % 8 == 0
        dtype = torch.int64 if self._has_words else blocks.dtype
        self._blocks = blocks.movedim(2, 0).flatten(3).view(dtype)
        self._host_blocks = host_blocks.flatten(3).view(dtype)
        size = max(1, staging_bytes // max(1, self._blocks[0].nbytes))
        shape = (min(size, len(self._host_blocks)), *self._blocks.shape[1:])
        self._staging = torch.empty(shape, dtype=dtype, device=blocks.device)
        self._latest: Queued | None = None
        """The latest copies, if they may be under way."""

    def join(self) -> None:
        """Let everything that is queued on the current stream from now on wait for the copies."""
        if self._latest is not None:
            if not self._latest.done():
                self._latest.hold_back()
            self._latest = None

    def save(self, pairs: Sequence[Pair]) -> Saved:
        """Begin to copy, after everything that is queued on the current stream."""
        # Neighbours on the host are copied together.
        ordered = sorted(pairs, key=lambda pair: pair[1])
        sums: list[Tensor] = []

        def copy() -> None:
            size = len(self._staging)
            for start in range(0, len(ordered), size):
                sums.extend(self._copy(ordered[start : start + size]))

        self._latest = self._side.queue(copy)
        return Saved(self._latest, [target for _, target in ordered], sums, self._note_sum)

    def _copy(self, pairs: Sequence[Pair]) -> list[Tensor]:
        """Called in the side stream. Returns the sums, which are being copied to the host."""
        staged = self._staging[: len(pairs)]
        sources = _to_device([source for source, _ in pairs], self._blocks.device)
        torch.index_select(self._blocks, 0, sources, out=staged)
        for start, targets in _runs([target for _, target in pairs]):
            copies = self._host_blocks[targets.start : targets.stop]
            copies.copy_(staged[start : start + len(targets)], non_blocking=True)
        return [_to_host(staged.flatten(1).sum(1))] if self._has_words else []


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, range]]:
    """The runs of consecutive numbers in an ascending list, each with its index."""
    offsets = count()
    index = 0
    for _, run in groupby(numbers, lambda number: number - next(offsets)):
        members = list(run)
        yield index, range(members[0], members[-1] + 1)
        index += len(members)


def _to_device(numbers: list[int], device: torch.device) -> Tensor:
    """Without waiting for the device: memory that is not pinned would be copied immediately."""
    tensor = torch.tensor(numbers, dtype=torch.int64, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type == "cpu":
        return tensor
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
