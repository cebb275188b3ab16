"""Tests whether a token has the same bits whenever it is computed, and in how long passes, on layers as wide as the
model's: the plugin chooses its kernels by the sizes of a matrix product."""

from dataclasses import replace as replace_field
from functools import cache
from typing import NamedTuple

import torch
from msgspec.structs import replace

from engine_worker.lora.paged import NO_ADAPTER
from engine_worker.models.config import DecoderConfig
from engine_worker.openvino.compiled import Precision
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.openvino.passes import LEAST_TOKENS
from engine_worker.openvino.trial import ADAPTER, Shape, compute, one_slice, random_decoder
from engine_worker.step import Slice
from sluice.settings.engine import OPENVINO_BLOCK

VOCABULARY = 1024
"""Tokens of the test's vocabulary, fewer than a model's: most of its weights would be there."""
PASSES = (LEAST_TOKENS, 96, 128, 256, 512)
"""Lengths of a pass to test, each a multiple of a block. More tokens in one pass would not make a step faster."""
PROMPT, GENERATED = 150, 6
"""Tokens of the sequence that is computed twice. The prompt ends within a block."""
BESIDE = 20
"""Tokens of the sequence beside it."""
AGAIN = PASSES[-1] // OPENVINO_BLOCK
"""The first block of the second computation."""
BLOCKS = 2 * AGAIN + 1


class Exact(NamedTuple):
    exact: bool
    """See `Runner`."""
    pass_tokens: int
    """See `passes.divide`."""


@cache
def find_exact(shape: Shape, precision: Precision, threads: int, *, lora: bool = False) -> Exact:
    """`lora`: test with adapters too. Raises any error of OpenVINO. The result depends on nothing but the arguments and
    the CPU."""
    shape = wide(shape)
    config, decoder = shape.config, random_decoder(shape, precision, threads, lora=lora)
    adapters = (NO_ADAPTER, ADAPTER) if lora else (NO_ADAPTER,)
    passes = [_longest_pass(decoder.forward(BLOCKS), config, adapter) for adapter in adapters]
    pass_tokens = max(min(passes), LEAST_TOKENS)
    forward = decoder.forward(BLOCKS, pass_tokens)
    # A sequence without an adapter beside one that has it, and the other way round.
    pairs = zip(adapters, reversed(adapters), strict=True)
    return Exact(min(passes) > 0 and all(_is_exact(forward, config, *pair) for pair in pairs), pass_tokens)


def wide(shape: Shape) -> Shape:
    """One layer of each window and kinds of matrices, as wide as the model's."""
    config, kinds = shape.distinct_layers
    return Shape(replace_field(config, vocab_size=min(config.vocab_size, VOCABULARY)), kinds)


def _longest_pass(forward: OpenVinoForward, config: DecoderConfig, adapter: int) -> int:
    """The longest of PASSES whose tokens have the same bits as in passes of a block; 0: none."""
    longest, blocks = 0, []
    for size in PASSES:
        for past in range(longest, size, OPENVINO_BLOCK):
            part = one_slice(config, past, OPENVINO_BLOCK, tuple(range(AGAIN)), adapter)
            blocks.append(compute(forward, [_with_all_rows(part)]).clone())
        whole = one_slice(config, 0, size, tuple(range(AGAIN, 2 * AGAIN)), adapter)
        if not torch.equal(compute(forward, [_with_all_rows(whole)]), torch.cat(blocks)):
            break
        longest = size
    return longest


def _with_all_rows(part: Slice) -> Slice:
    """The logits of a slice with drafts are those of each of its tokens."""
    count = len(part.tokens)
    return replace(part, draws=part.draws * count, drafts=count - 1)


def _is_exact(forward: OpenVinoForward, config: DecoderConfig, adapter: int, other_adapter: int) -> bool:
    """Whether tokens have the same bits when they are computed again: in other blocks, beside another sequence, after a
    prompt in other chunks."""

    def part(past: int, count: int, first_block: int) -> Slice:
        return one_slice(config, past, count, tuple(range(first_block, first_block + AGAIN)), adapter)

    beside = one_slice(config, 0, BESIDE, (2 * AGAIN,), other_adapter)
    compute(forward, [part(0, PROMPT, 0)])
    generated = [_last_row(forward, [part(PROMPT + i, 1, 0)]) for i in range(GENERATED)]
    for past, count in ((0, OPENVINO_BLOCK), (OPENVINO_BLOCK, PROMPT - OPENVINO_BLOCK)):
        compute(forward, [beside, part(past, count, AGAIN)])
    if forward.separates:
        # All in one step: its last row depends on the others.
        separate = replace(part(PROMPT, GENERATED, AGAIN), separate=True)
        return torch.equal(_last_row(forward, [beside, separate]), generated[-1])
    rows = [_last_row(forward, [beside, part(PROMPT + i, 1, AGAIN)]) for i in range(GENERATED)]
    return all(map(torch.equal, rows, generated))


def _last_row(forward: OpenVinoForward, slices: list[Slice]) -> torch.Tensor:
    """A copy of the logits of the last slice."""
    return compute(forward, slices)[-1].clone()
