"""The seam between the runner and what computes a model: torch on any device, OpenVINO on a CPU."""

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine_worker.runner.methods import Blocks, Rank
from engine_worker.step import Move, Slice


class PreparedStep(Protocol):
    """A step as `Forward.logits` takes it."""

    @property
    def follows(self) -> bool:
        """Whether the previous step draws some of its tokens."""

    def follow(self, sampled: Tensor) -> None:
        """Fill these in: `sampled` [D] int64."""


A = TypeVar("A")
S = TypeVar("S", bound=PreparedStep)


class Forward(Protocol[A, S]):
    """A loaded model with its KV cache. Steps are computed in the order of the calls of `logits`."""

    device: torch.device
    """Of the logits."""
    attention: str
    """For the log."""
    dtype: str
    """Of the computation, such as "float32": what makes two engines compute different tokens."""
    window: int | None
    """See `Runner.window`."""
    vocab_size: int
    rank: Rank
    """For methods that are called by name."""

    @property
    def cache(self) -> Blocks: ...

    def arrays(self, slices: Sequence[Slice]) -> A:
        """At least one slice as plain data, which can be sent to other ranks."""

    def prepare(self, arrays: A) -> S:
        """Everything else that can be done before the previous step has finished."""

    def logits(self, moves: Iterable[Move], step: S | None) -> Tensor | None:
        """Move blocks, then compute a step -> [R, vocab] float32 for the tokens whose logits are needed, in memory that
        the next step may overwrite; None without any."""

    def check(self) -> None:
        """After a step has failed: wait for the device. Raises RuntimeError if nothing can be computed any more."""

    def close(self) -> None:
        """Wait for the device; nothing can be computed afterwards."""
