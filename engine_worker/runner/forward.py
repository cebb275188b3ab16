"""The seam between the runner and what computes a model: torch on any device, OpenVINO on a CPU."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import LoadPlan
from engine_worker.runner.methods import Blocks, Rank
from engine_worker.step import Move, Slice

BLOCK_BYTES = 4 << 20
LEAST_ROWS = 64


def rows_per_block(vocab_size: int) -> int:
    """Rows of logits beside the draws' that are computed at once: as many as BLOCK_BYTES hold, and at least LEAST_ROWS,
    fewer of which would make the product slow. Those of a whole chunk may take more memory than everything else in the
    step (512 rows of 152,000 tokens: 311 MB)."""
    return max(LEAST_ROWS, BLOCK_BYTES // (4 * vocab_size))


Layers = Mapping[int, Tensor]
"""[N, hidden]: the residual stream after layers, by their index."""
NO_LAYERS: Layers = {}


def rows_between(layers: Layers, start: int, end: int) -> Layers:
    return {layer: rows[start:end] for layer, rows in layers.items()} if layers else NO_LAYERS


TakeRows = Callable[[Tensor, Tensor, Layers], None]
"""Gets hidden states [N, hidden], as the head gets them, logits [N, vocab] float32 and, in a step that wants any, the
output layers of the next N tokens of `Slice.rows`, in memory that the next call may overwrite."""


def ignore_rows(_hidden: Tensor, _logits: Tensor, _layers: Layers) -> None:
    """Ranks other than 0 compute their part of the logits only."""


class PreparedStep(Protocol):
    """A step as `Forward.logits` takes it."""

    @property
    def follows(self) -> bool:
        """Whether the previous step draws some of its tokens."""

    @property
    def has_rows(self) -> bool:
        """Whether rows beside the draws' are wanted."""

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
    hidden_size: int
    hidden_dtype: torch.dtype
    """Of the hidden states that `take` gets."""
    takes_embeds: bool
    """Whether prompts may have tables: rows of `hidden_size`."""
    output_layers: tuple[int, ...]
    """Layers that `take` can get."""
    rank: Rank
    """For methods that are called by name."""

    @property
    def cache(self) -> Blocks: ...

    def arrays(self, slices: Sequence[Slice]) -> A:
        """At least one slice as plain data, which can be sent to other ranks."""

    def prepare(self, arrays: A) -> S:
        """Everything else that can be done before the previous step has finished."""

    def load_adapters(self, plans: Sequence[LoadPlan], weights: Sequence[AdapterWeights] = ()) -> None:
        """Copy LoRA adapters to the device, before the step that they come with. `weights`: of each; only rank 0 has
        them. On one rank a copy that fails harms no other; with several ranks it raises."""

    def missing_adapters(self, step: S) -> Mapping[int, str]:
        """See `Launched.missing_adapters`; slices with one of them are computed as if they had none."""

    def logits(self, moves: Iterable[Move], step: S | None, take: TakeRows = ignore_rows) -> Tensor | None:
        """Move blocks, then compute a step -> [R, vocab] float32 for the tokens that draw, in memory that the next step
        may overwrite; None without any. `take` is called for the tokens of `Slice.rows`, block by block."""

    def check(self) -> None:
        """After a step has failed: wait for the device. Raises RuntimeError if nothing can be computed any more."""

    def close(self) -> None:
        """Wait for the device; nothing can be computed afterwards."""
