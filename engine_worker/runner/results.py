"""What a step drew, on its way from the device."""

import torch
from torch import Tensor

from engine_worker.sampling.logprobs import Scores
from engine_worker.sampling.sampler import Sampled
from engine_worker.step import Draw, Drawn


class Results:
    """Copies to pinned memory are under way from the start; nothing waits for them before `drawn`."""

    def __init__(self, sampled: Sampled, draws: list[Draw], *, hidden: bool) -> None:
        """`hidden`: the next step is queued before this one is waited for, so a late wake-up costs nothing."""
        self.tokens = sampled.tokens
        """[D] int64, where they were drawn."""
        self._draws = draws
        self._there: torch.cuda.Event | None = None
        if self.tokens.device.type != "cpu":
            scores = None if sampled.scores is None else Scores(*map(_on_host, sampled.scores))
            short = None if sampled.short is None else _on_host(sampled.short)
            sampled = Sampled(_on_host(sampled.tokens), _on_host(sampled.valid), scores, short)
            # CUDA waits in a loop by default and takes a whole core for it, which router and detokenizer may need; a
            # blocking wait wakes up some 50 µs later. `short` is on the way to the next step, so it must not block.
            self._there = torch.cuda.Event(blocking=hidden and short is None)
            self._there.record()
        self._sampled = sampled

    def drawn(self) -> list[Drawn]:
        """As plain data, one per draw."""
        if self._there is not None:
            self._there.synchronize()
        return self._sampled.results(self._draws)

    def short(self) -> bool:
        """See `Sampled.short`; waits where there is something to tell."""
        if self._sampled.short is None:
            return False
        if self._there is not None:
            self._there.synchronize()
        return bool(self._sampled.short)


def _on_host(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
