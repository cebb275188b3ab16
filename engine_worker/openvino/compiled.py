"""Compiles a graph for this CPU."""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from engine_worker.models.config import DecoderConfig
from engine_worker.models.decoder import CausalLM
from engine_worker.openvino.adapters import GraphAdapters
from engine_worker.openvino.graph import INPUTS, build
from engine_worker.openvino.precision import Precision
from engine_worker.openvino.store import ConstantStore
from engine_worker.openvino.weights import formats


def compile_decoder(
    model: CausalLM,
    precision: Precision,
    threads: int,
    store: ConstantStore,
    output_layers: Sequence[int] = (),
    *,
    lora: bool = False,
) -> ov.CompiledModel:
    """Build and compile the graph. The weights are then owned by `store`, so the model may be dropped. Raises any error
    of OpenVINO. `lora`: with operations for adapters."""
    properties = {
        **precision.properties,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # With pinning, all engines of a machine would be bound to the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    adapters = GraphAdapters() if lora else None
    graphs = build(model, formats(precision.quantize, store.keep), output_layers, adapters)
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


def cache_shapes(compiled: ov.CompiledModel, config: DecoderConfig) -> list[tuple[list[int], ov.Type]]:
    """Shape and type of one block in each cache input: keys and values of each layer in turn."""
    caches = compiled.inputs[len(INPUTS) : len(INPUTS) + 2 * config.num_layers]
    return [([int(str(size)) for size in list(cache.partial_shape)[1:]], cache.element_type) for cache in caches]
