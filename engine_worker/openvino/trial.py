"""Tests graph and plugin against torch on this machine, with a small decoder that has the options of the real one."""

from collections.abc import Container
from dataclasses import replace as replace_field
from itertools import product
from typing import Any, NamedTuple

import openvino as ov
import torch

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
from engine_worker.openvino.kinds import NO_KINDS, Kinds, RandomMatrices
from engine_worker.openvino.matrices import Matrices
from engine_worker.openvino.weights import ConstantStore, Weights
from engine_worker.positions import PlacedGrid, Positions
from engine_worker.runner.forward import Forward
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.runner.weights import random_weights
from engine_worker.step import NO_LIMIT, AdapterLoad, Draw, Slice
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
GRID = PlacedGrid(3, 15, 5)
"""Rotary positions like those of an image, for models with M-RoPE."""


class RefusedError(Exception):
    """OpenVINO cannot serve this checkpoint here; the message says why."""


class Shape(NamedTuple):
    """Of a decoder to test."""

    config: DecoderConfig
    kinds: Kinds = NO_KINDS

    @property
    def distinct_layers(self) -> "Shape":
        """One layer of each window and kinds of matrices."""
        windows = [None if window is None else WINDOW for window in self.config.windows]
        pairs = zip(windows, self.kinds.layers or ((),) * len(windows), strict=True)
        layers = sorted(dict.fromkeys(pairs), key=lambda pair: pair[0] is not None)
        kinds = tuple(kinds for _, kinds in layers)
        config = replace_field(self.config, windows=tuple(window for window, _ in layers))
        return Shape(config, self.kinds._replace(layers=kinds if any(kinds) else ()))

    @property
    def small(self) -> "Shape":
        """The same options in a much smaller decoder."""
        config, kinds = self.distinct_layers
        heads, unit = config.heads, max((kind.group or 0 for kind in kinds.by_name.values()), default=0)
        kv_heads, unit = min(2, heads.num_kv_heads), max(unit, 32)
        small = replace_field(
            config,
            vocab_size=128,
            # Matrices have several groups in each row.
            hidden_size=2 * unit,
            intermediate_size=3 * unit,
            heads=HeadShape(kv_heads * heads.group, kv_heads, heads.head_dim, heads.scaling),
        )
        return Shape(small, kinds)


class RandomDecoder(NamedTuple):
    """A decoder with random weights, and the same compiled."""

    model: CausalLM
    config: DecoderConfig
    compiled: ov.CompiledModel
    precision: Precision
    threads: int
    adapters: DeviceAdapters | None

    def forward(self, num_blocks: int, pass_tokens: int = NO_LIMIT) -> OpenVinoForward:
        """`pass_tokens`: see `passes.divide`."""
        cache = BlockCache(BlockShape.of(self.compiled, self.config.num_layers), num_blocks)
        return OpenVinoForward(
            self.compiled,
            self.config,
            cache,
            "float32",
            self.threads,
            adapters=self.adapters,
            separates=self.precision.separates,
            pass_tokens=pass_tokens,
        )


def random_decoder(
    shape: Shape, precision: Precision, threads: int, *, lora: bool, rounded: bool = False
) -> RandomDecoder:
    """`lora`: with the adapter ADAPTER. `rounded`: the model's weights are those that the graph's quantized weights
    stand for. Raises any error of OpenVINO."""
    config, kinds = shape
    model = CausalLM(config, ReferenceAttention(config.heads), Place(torch.float32, CPU, UNSHARDED))
    random_weights(model.targets(), 0, 0.1, lambda *_: None)
    model.freeze()
    adapters = _random_adapter(model) if lora else None
    store = ConstantStore()
    matrices = RandomMatrices(model.targets(), kinds)
    compiled = compile_decoder(model, precision, threads, store, lora=lora, matrices=matrices)
    if rounded:
        _round(model, Weights(precision.quantize, store), matrices)
    return RandomDecoder(model, config, compiled, precision, threads, adapters)


def verify(shape: Shape, precision: Precision, threads: int, *, lora: bool = False) -> str:
    """Returns the result for the log. `lora`: test with adapters too. Raises RefusedError, and any error of
    OpenVINO."""
    shape = shape.small
    config = shape.config
    decoder = random_decoder(shape, precision, threads, lora=lora, rounded=True)
    heads, backend = config.heads, ReferenceAttention(config.heads)
    sizes = (config.num_layers, BLOCKS, OPENVINO_BLOCK, heads.num_kv_heads, heads.head_dim)
    cache = KVCache(*sizes, torch.float32, CPU)
    reference = TorchForward(decoder.model, cache, backend, CPU, adapters=decoder.adapters)
    forward = decoder.forward(BLOCKS)
    rounds = precision.activations and (precision.quantize != "none" or shape.kinds.rounds_activations)
    plain = not rounds and precision.dtype == "float32"
    allowed = TOLERANCE[precision.kv] if plain else ROUNDED_TOLERANCE
    # With adapters too, between steps without.
    for adapted, sequences in product(((), ADAPTED, ()) if lora else ((),), STEPS):
        slices = _slices(sequences, config, adapted)
        error = _error(compute(reference, slices), compute(forward, slices))
        # Not `error > ...`: a NaN must fail too.
        if not error <= allowed:
            raise RefusedError(f"its logits are off by {error:.2g} of the largest logit in a test step of {sequences}")
    fused, total = fused_rotations(decoder.compiled), 2 * config.num_layers
    return "it agrees with torch in a test" + ("" if fused == total else f", but fused {fused} of {total} rotations")


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


def _round(model: CausalLM, weights: Weights, matrices: Matrices) -> None:
    """Replace the model's weights by the values that the graph's quantized weights stand for."""
    for name, matrix in model.targets().items():
        if (stored := matrices.read(name)) is not None:
            matrix.copy_(stored.decode())
        elif matrix.dim() == 2:
            matrix.copy_(weights.of(name).rounded(matrix))


def compute(forward: Forward[Any, Any], slices: list[Slice]) -> torch.Tensor:
    """The step's logits, in memory that the next step may overwrite."""
    logits = forward.logits((), forward.prepare(forward.arrays(slices)))
    if logits is None:
        raise RefusedError("a test step returned no logits")
    return logits


def _error(expected: torch.Tensor, computed: torch.Tensor) -> float:
    """The largest error of a logit, relative to the largest logit."""
    return float((computed - expected).abs().max() / expected.abs().max())


def _slices(
    sequences: tuple[tuple[int, int, tuple[int, ...]], ...], config: DecoderConfig, adapted: Container[tuple[int, ...]]
) -> list[Slice]:
    """`adapted`: blocks of the sequences that have the adapter."""
    return [one_slice(config, *sequence, ADAPTER if sequence[2] in adapted else NO_ADAPTER) for sequence in sequences]


def one_slice(
    config: DecoderConfig, past: int, count: int, blocks: tuple[int, ...], adapter: int = NO_ADAPTER
) -> Slice:
    """That samples after its last token."""
    positions = None if config.rope.sections is None else Positions([GRID])
    tokens = [(7 * (past + i) + 3) % config.vocab_size for i in range(count)]
    return Slice(tokens, past, blocks, (DRAW,), adapter_slot=adapter, positions=positions)
