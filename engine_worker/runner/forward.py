"""The interface between the runner and the forward pass: torch on any device, OpenVINO on a CPU."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from engine_worker.attention.saver import Saved
from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import LoadPlan
from engine_worker.runner.methods import Blocks, Rank
from engine_worker.step import Move, Slice

BLOCK_BYTES = 4 << 20
LEAST_ROWS = 64


def rows_per_block(vocab_size: int) -> int:
    """Number of rows of logits, in addition to those of the draws, that are computed at a time: as many as fit in
    BLOCK_BYTES, but at least LEAST_ROWS, since the product is slow for fewer rows. The logits of a whole chunk may take
    more memory than the rest of the step (512 rows of 152,000 tokens: 311 MB)."""
    return max(LEAST_ROWS, BLOCK_BYTES // (4 * vocab_size))


Layers = Mapping[int, Tensor]
"""[N, hidden]: the residual stream after layers, by their index."""
NO_LAYERS: Layers = {}


def rows_between(layers: Layers, start: int, end: int) -> Layers:
    return {layer: rows[start:end] for layer, rows in layers.items()} if layers else NO_LAYERS


TakeRows = Callable[[Tensor, Tensor, Layers], None]
"""Called with the next N tokens of `Slice.rows`: their hidden states [N, hidden], the input of the head; logits
[N, vocab] float32; and, if the step requests any, output layers. The next call may overwrite their memory."""


def ignore_rows(_hidden: Tensor, _logits: Tensor, _layers: Layers) -> None:
    """For ranks other than 0, which only compute their part of the logits."""


class PreparedStep(Protocol):
    """A step that is ready for `Forward.logits`."""

    @property
    def follows(self) -> bool:
        """Whether the previous step samples some of its tokens."""

    @property
    def has_rows(self) -> bool:
        """Whether rows in addition to those of the draws are requested."""

    def follow(self, sampled: Tensor) -> None:
        """Fill in the tokens that the previous step has sampled: `sampled` [D] int64."""


A = TypeVar("A")
S = TypeVar("S", bound=PreparedStep)


class Forward(Protocol[A, S]):
    """A loaded model with its KV cache. Steps are computed in the order of the calls of `logits`."""

    device: torch.device
    """Device of the logits."""
    attention: str
    """Name of the attention backend, for the log."""
    dtype: str
    """Precision of the computation, such as "float32". Engines that differ in it may compute different tokens."""
    window: int | None
    """See `Runner.window`."""
    vocab_size: int
    hidden_size: int
    hidden_dtype: torch.dtype
    """dtype of the hidden states that are passed to `take`."""
    takes_embeds: bool
    """Whether prompts may have tables, whose rows have `hidden_size` elements."""
    exact: bool
    separates: bool
    """See `Runner`, like `exact`."""
    output_layers: tuple[int, ...]
    """Layers that can be passed to `take`."""
    rank: Rank
    """First argument of methods that are called by name."""

    @property
    def cache(self) -> Blocks: ...

    def arrays(self, slices: Sequence[Slice]) -> A:
        """Convert one or more slices to plain data, which can be sent to other ranks."""

    def prepare(self, arrays: A) -> S:
        """Do everything else that is possible before the previous step has finished."""

    def load_adapters(self, plans: Sequence[LoadPlan], weights: Sequence[AdapterWeights] = ()) -> None:
        """Copy LoRA adapters to the device, before the step that loads them is computed. `weights`: one per plan, only
        on rank 0. With one rank, a failed copy affects no other adapter; with several ranks it raises."""

    def missing_adapters(self, step: S) -> Mapping[int, str]:
        """See `Launched.missing_adapters`. Slices with a missing adapter are computed without an adapter."""

    def logits(self, moves: Iterable[Move], step: S | None, take: TakeRows = ignore_rows) -> Tensor | None:
        """Move blocks, then compute a step. Returns [R, vocab] float32, the logits to sample from, in memory that the
        next step may overwrite; None if the step samples nothing. `take` is called for the tokens of `Slice.rows`,
        block by block."""

    def take_saved(self) -> Saved | None:
        """Remove and return the copies of blocks that the latest call of `logits` began; None: it began none."""

    def check(self) -> None:
        """Called after a failed step: wait for the device. Raises RuntimeError if it can no longer compute."""

    def close(self) -> None:
        """Wait for the device. No step can be computed afterwards."""
