"""Tests graph and plugin against torch on this machine, with a small decoder that has the options of the real one."""

from collections.abc import Container
from dataclasses import replace as replace_field
from itertools import product
from typing import Any, NamedTuple

import torch
from msgspec.structs import replace

from engine_worker.attention.backend import HeadShape
from engine_worker.attention.cache import KVCache
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.adapters import find_targets
from engine_worker.layers.shard import UNSHARDED, Place
from engine_worker.lora.checkpoint import AdapterWeights, ModuleWeights
from engine_worker.lora.device import DeviceAdapters, LoadPlan, make_adapters
from engine_worker.lora.paged import NO_ADAPTER
from engine_worker.models.config import DecoderConfig
from engine_worker.models.decoder import CausalLM
from engine_worker.openvino.cache import CPU, BlockCache, BlockShape
from engine_worker.openvino.compiled import Precision, compile_decoder, fused_rotations
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.openvino.weights import ConstantStore, Weights, formats
from engine_worker.positions import PlacedGrid, Positions
from engine_worker.runner.forward import Forward
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.runner.weights import random_weights
from engine_worker.step import AdapterLoad, Draw, Slice
from sluice.settings.engine import OPENVINO_BLOCK, LoraOptions
from sluice.wire.params import SamplingParams

TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 0.1, "u8": 0.1}
"""Largest allowed error of a logit, relative to the largest logit, for each type of the KV cache."""
ROUNDED_TOLERANCE = 0.1
"""The same with quantized weights or in bfloat16: the plugin then rounds the activations too."""
# Narrower than the longest test context, and not a multiple of a block.
WINDOW = 40
DRAW = Draw(SamplingParams(temperature=0.0), 0, 0)
# The sequences of each step: (tokens in the cache, tokens of the step, blocks).
STEPS = (
    ((0, 70, (5, 1, 3)), (0, 1, (0,))),
    ((70, 1, (5, 1, 3)), (1, 1, (0,))),
    ((0, 33, (6, 4)), (71, 20, (5, 1, 3)), (2, 1, (0,))),
    ((33, 1, (6, 4)),),
)
BLOCKS = 7
ADAPTER, ADAPTER_RANK, PAGE_RANKS, ADAPTER_SIZE = 1, 5, 4, 0.3
"""Of the adapter in the test steps: its number, its rank, ranks in a page, and size of its values: about the effect of
the model's weights."""
ADAPTED = ((5, 1, 3),)
"""Blocks of the sequences in STEPS that have the adapter."""
PROMPT, GENERATED = 60, 6
"""Tokens of the sequence that is computed twice. The prompt ends within a block."""
GRID = PlacedGrid(3, 15, 5)
"""Rotary positions like those of an image, for models with M-RoPE."""


class RefusedError(Exception):
    """OpenVINO cannot serve this checkpoint here; the message says why."""


def small(config: DecoderConfig) -> DecoderConfig:
    """The same options in a much smaller decoder."""
    heads = config.heads
    kv_heads = min(2, heads.num_kv_heads)
    return replace_field(
        config,
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        windows=(*({None} & set(config.windows)), *({WINDOW} if any(config.windows) else ())),
        heads=HeadShape(kv_heads * heads.group, kv_heads, heads.head_dim, heads.scaling),
    )


class Trial(NamedTuple):
    result: str
    """For the log."""
    exact: bool
    """See `Runner`."""


def verify(config: DecoderConfig, precision: Precision, threads: int, *, lora: bool = False) -> Trial:
    """`lora`: test with adapters too. Raises RefusedError, and any error of OpenVINO."""
    config = small(config)
    backend = ReferenceAttention(config.heads)
    model = CausalLM(config, backend, Place(torch.float32, CPU, UNSHARDED))
    random_weights(model.targets(), 0, 0.1, lambda *_: None)
    model.freeze()
    heads = config.heads
    sizes = (config.num_layers, BLOCKS, OPENVINO_BLOCK, heads.num_kv_heads, heads.head_dim)
    adapters = _random_adapter(model) if lora else None
    reference = TorchForward(model, KVCache(*sizes, torch.float32, CPU), backend, CPU, adapters=adapters)
    store = ConstantStore()
    compiled = compile_decoder(model, precision, threads, store, lora=lora)
    _round(model, formats(precision.quantize, store))
    cache = BlockCache(BlockShape.of(compiled, config.num_layers), BLOCKS)
    forward = OpenVinoForward(
        compiled, config, cache, "float32", threads, adapters=adapters, separates=precision.separates
    )
    plain = precision.quantize == "none" and precision.dtype == "float32"
    allowed = TOLERANCE[precision.kv] if plain else ROUNDED_TOLERANCE
    # With adapters too, between steps without.
    for adapted, sequences in product(((), ADAPTED, ()) if lora else ((),), STEPS):
        slices = _slices(sequences, config, adapted)
        error = _error(_logits(reference, slices), _logits(forward, slices))
        # Not `error > ...`: a NaN must fail too.
        if not error <= allowed:
            raise RefusedError(f"its logits are off by {error:.2g} of the largest logit in a test step of {sequences}")
    fused, total = fused_rotations(compiled), 2 * config.num_layers
    result = "it agrees with torch in a test" + ("" if fused == total else f", but fused {fused} of {total} rotations")
    # A sequence without an adapter beside one that has it, and the other way round.
    pairs = ((NO_ADAPTER, ADAPTER), (ADAPTER, NO_ADAPTER)) if lora else ((NO_ADAPTER, NO_ADAPTER),)
    return Trial(result, all(_is_exact(forward, config, *pair) for pair in pairs))


def _is_exact(forward: OpenVinoForward, config: DecoderConfig, adapter: int, other_adapter: int) -> bool:
    """Whether tokens have the same bits when they are computed again: in other blocks, beside another sequence, after a
    prompt in other chunks."""

    def part(past: int, count: int, blocks: tuple[int, ...]) -> Slice:
        return _slice(config, past, count, blocks, adapter)

    first, again, beside = (0, 1, 2), (3, 4, 5), _slice(config, 0, 20, (6,), other_adapter)
    _logits(forward, [part(0, PROMPT, first)])
    generated = [_row(forward, [part(PROMPT + i, 1, first)]) for i in range(GENERATED)]
    for past, count in ((0, OPENVINO_BLOCK), (OPENVINO_BLOCK, PROMPT - OPENVINO_BLOCK)):
        _logits(forward, [beside, part(past, count, again)])
    if forward.separates:
        # All in one step: its last row depends on the others.
        separate = replace(part(PROMPT, GENERATED, again), separate=True)
        return torch.equal(_row(forward, [beside, separate]), generated[-1])
    rows = [_row(forward, [beside, part(PROMPT + i, 1, again)]) for i in range(GENERATED)]
    return all(map(torch.equal, rows, generated))


def _row(forward: OpenVinoForward, slices: list[Slice]) -> torch.Tensor:
    """A copy of the logits of the last slice."""
    return _present(_logits(forward, slices))[-1].clone()


def _random_adapter(model: CausalLM) -> DeviceAdapters:
    """An adapter of all linear maps, on the device under the number ADAPTER."""
    targets, random = find_targets(model.model.layers), torch.Generator().manual_seed(0)

    def matrix(columns: int) -> torch.Tensor:
        return torch.randn(ADAPTER_RANK, columns, generator=random) * ADAPTER_SIZE

    modules = tuple(
        ModuleWeights(target, matrix(target.inputs.size), matrix(target.outputs.size)) for target in targets
    )
    weights = AdapterWeights(modules)
    num_pages = weights.num_pages(PAGE_RANKS)
    options = LoraOptions(lora_optimal_adapter_size=PAGE_RANKS, lora_num_device_module_layer=num_pages * PAGE_RANKS)
    adapters = make_adapters(targets, options, torch.float32, CPU, UNSHARDED, 0)
    adapters.load([LoadPlan.of(AdapterLoad(ADAPTER, "", tuple(range(num_pages))), weights)], [weights])
    return adapters


def _round(model: CausalLM, weights: Weights) -> None:
    """Replace the model's weights by the values that the graph's quantized weights stand for."""
    for name, matrix in model.targets().items():
        if matrix.dim() == 2:
            table = name.endswith(("embed_tokens.weight", "lm_head.weight"))
            matrix.copy_((weights.vocabulary if table else weights.layers).rounded(matrix))


def _logits(forward: Forward[Any, Any], slices: list[Slice]) -> torch.Tensor | None:
    return forward.logits((), forward.prepare(forward.arrays(slices)))


def _error(expected: torch.Tensor | None, computed: torch.Tensor | None) -> float:
    """The largest error of a logit, relative to the largest logit."""
    expected, computed = _present(expected), _present(computed)
    return float((computed - expected).abs().max() / expected.abs().max())


def _present(logits: torch.Tensor | None) -> torch.Tensor:
    if logits is None:
        raise RefusedError("a test step returned no logits")
    return logits


def _slices(
    sequences: tuple[tuple[int, int, tuple[int, ...]], ...], config: DecoderConfig, adapted: Container[tuple[int, ...]]
) -> list[Slice]:
    """`adapted`: blocks of the sequences that have the adapter."""
    return [_slice(config, *sequence, ADAPTER if sequence[2] in adapted else NO_ADAPTER) for sequence in sequences]


def _slice(config: DecoderConfig, past: int, count: int, blocks: tuple[int, ...], adapter: int = NO_ADAPTER) -> Slice:
    positions = None if config.rope.sections is None else Positions([GRID])
    tokens = [(7 * (past + i) + 3) % config.vocab_size for i in range(count)]
    return Slice(tokens, past, blocks, (DRAW,), adapter_slot=adapter, positions=positions)
