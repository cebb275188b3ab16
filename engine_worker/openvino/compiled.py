"""Compiles a graph for this CPU, in the numeric precision of the settings."""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from engine_worker.formats.rounding import NAMES
from engine_worker.models.decoder import CausalLM
from engine_worker.openvino.adapters import GraphAdapters
from engine_worker.openvino.graph import build
from engine_worker.openvino.matrices import NO_MATRICES, Matrices, Products
from engine_worker.openvino.weights import ConstantStore, Weights
from engine_worker.runner.config import RunnerConfig

TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "u8": "u8"}
"""OpenVINO's name of each type that the settings can name."""
CACHE_TYPES = {"float32": ("float32", "float16", "u8"), "bfloat16": ("bfloat16", "u8")}
"""For each `dtype`, the types that the KV cache can have, the default first."""


class Precision(NamedTuple):
    """The settings `dtype`, `quantize` and `kv_precision` with "auto" resolved."""

    dtype: str = "float32"
    """Type of activations and accumulators."""
    quantize: str = "none"
    kv: str = "float32"
    """Type of the KV cache."""
    activations: bool = True
    """Whether the plugin may quantize the activations of products whose weights are quantized."""
    stored: bool = False
    """Whether it does so for matrices that the checkpoint stores."""

    @classmethod
    def of(cls, config: RunnerConfig) -> "Precision":
        """Raises ValueError if `kv_precision` is not available with `dtype`."""
        dtype = "float32" if config.dtype == "auto" else config.dtype
        cache_types = CACHE_TYPES[dtype]
        kv = cache_types[0] if config.kv_precision == "auto" else config.kv_precision
        if kv not in cache_types:
            raise ValueError(f"kv_precision = {kv} contradicts dtype = {dtype}: use {' or '.join(cache_types)}")
        return cls(dtype, config.quantize, kv, config.quantized_activations)

    @property
    def separates(self) -> bool:
        """See `Runner`. u8 keys of a block are quantized together: their values depend on the steps that wrote them."""
        return self.kv != "u8"

    @property
    def properties(self) -> dict[str, str]:
        """Properties for the CPU plugin, which by default computes in bfloat16 on every CPU that supports it."""
        exact = {} if self.activations else {"DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
        return {"INFERENCE_PRECISION_HINT": TYPES[self.dtype], "KV_CACHE_PRECISION": TYPES[self.kv], **exact}

    def __str__(self) -> str:
        """Name of the computation. Engines whose names differ may sample different tokens."""
        weights = self.dtype if self.quantize == "none" else NAMES[self.quantize]
        computed = f"{weights}, computed in {self.dtype}" if weights != self.dtype != "float32" else weights
        if self.stored and self.activations:
            computed += ", activations int8"
        elif self.quantize != "none" and not self.activations:
            computed += ", activations exact"
        return computed if self.kv == self.dtype else f"{computed}, KV cache {self.kv}"


def compile_decoder(
    model: CausalLM,
    precision: Precision,
    threads: int,
    store: ConstantStore,
    output_layers: Sequence[int] = (),
    *,
    lora: bool = False,
    matrices: Matrices = NO_MATRICES,
) -> ov.CompiledModel:
    """Build and compile the graph. The weights are then owned by `store`, so the model may be dropped. Raises any error
    of OpenVINO. `lora`: with operations for adapters. `matrices`: those that are not in the model."""
    properties = {
        **precision.properties,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # With pinning, all engines of a machine would be bound to the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    adapters = GraphAdapters() if lora else None
    products = Products(Weights(precision.quantize, store), store, precision.activations)
    graphs = build(model, products, output_layers, adapters, matrices)
    compiled = _core().compile_model(graphs.decoder, "CPU", properties)
    # Attributes of the compiled model, so that they live as long as it does.
    compiled.store, compiled.head, compiled.adapters = store, Head(graphs.head, properties), adapters
    return compiled


class Head:
    """The last norm and the output head, for rows whose hidden states the decoder returns."""

    def __init__(self, graph: ov.Model, properties: dict[str, Any]) -> None:
        self._graph = graph
        self._properties = properties

    def __call__(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """hidden [N, hidden] -> (normed [N, hidden], logits [N, vocab]), in memory that the next call overwrites."""
        self._request.set_input_tensor(0, ov.Tensor(np.ascontiguousarray(hidden), shared_memory=True))
        self._request.infer(share_outputs=True)
        logits, normed = (self._request.get_output_tensor(index).data for index in range(2))
        return normed, logits

    @cached_property
    def _request(self) -> ov.InferRequest:
        # Compiled on first use only: the plugin packs a second copy of the weights for it.
        return _core().compile_model(self._graph, "CPU", self._properties).create_infer_request()


def has_bfloat16() -> bool:
    """Whether this CPU computes bfloat16 in hardware. Otherwise bfloat16 is slower than float32."""
    return "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@cache
def _core() -> ov.Core:
    """One `Core` per process, never destroyed.

    On a CPU with AMX each Core installs an alternate signal stack in the thread that first uses it, and restores the
    previous stack when it is destroyed. If two Cores are destroyed in the order of their creation, the thread is left
    with a freed stack, and the next signal ends the process with SIGSEGV.
    """
    return ov.Core()


def fused_rotations(compiled: ov.CompiledModel) -> int:
    """Number of rotary embeddings that the plugin has fused: two per layer if it recognizes our graph's pattern."""
    nodes = compiled.get_runtime_model().get_ordered_ops()
    return sum(str(node.get_rt_info()["layerType"].astype(str)) == "RoPE" for node in nodes)
