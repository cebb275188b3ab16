"""Compiles a graph for this CPU."""

from collections.abc import Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from engine_worker.models.config import DecoderConfig
from engine_worker.models.decoder import CausalLM
from engine_worker.openvino.graph import INPUTS, build
from engine_worker.openvino.precision import Precision
from engine_worker.openvino.store import Store
from engine_worker.openvino.weights import formats


def compile_decoder(
    model: CausalLM, precision: Precision, threads: int, store: Store, output_layers: Sequence[int] = ()
) -> ov.CompiledModel:
    """The store has the weights: the model may be dropped afterwards. Raises whatever OpenVINO raises."""
    properties = {
        **precision.properties,
        "INFERENCE_NUM_THREADS": threads,
        "NUM_STREAMS": 1,
        # Engines on one machine would all be bound to the same cores.
        "ENABLE_CPU_PINNING": False,
    }
    graphs = build(model, formats(precision.quantize, store.keep), output_layers)
    compiled = _core().compile_model(graphs.decoder, "CPU", properties)
    # They live as long as what was compiled.
    compiled.store, compiled.head = store, Head(graphs.head, properties)
    return compiled


class Head:
    """The last norm and the output head."""

    def __init__(self, graph: ov.Model, properties: dict[str, Any]) -> None:
        self._graph = graph
        self._properties = properties

    def __call__(self, hidden: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """[N, hidden] -> after the norm [N, hidden], logits [N, vocab], in memory that the next call overwrites."""
        self._request.set_input_tensor(0, ov.Tensor(np.ascontiguousarray(hidden), shared_memory=True))
        self._request.infer(share_outputs=True)
        logits, normed = (self._request.get_output_tensor(index).data for index in range(2))
        return normed, logits

    @cached_property
    def _request(self) -> ov.InferRequest:
        # Compiled when first needed: the plugin packs the weights for it once more.
        return _core().compile_model(self._graph, "CPU", self._properties).create_infer_request()


def has_bfloat16() -> bool:
    """Whether this CPU has units for it; on others it is slower than float32."""
    return "BF16" in _core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


@cache
def _core() -> ov.Core:
    """One per process, never dropped.

    On a CPU with AMX each core installs an alternate signal stack in the thread that first uses it and restores the
    one before when it goes. Two that go in the order of their making leave a freed stack behind, and the next signal
    ends the process with SIGSEGV.
    """
    return ov.Core()


def fused_rotations(compiled: ov.CompiledModel) -> int:
    """How many rotary embeddings the plugin has fused: all of them, two per layer, if it knows our graph."""
    nodes = compiled.get_runtime_model().get_ordered_ops()
    return sum(str(node.get_rt_info()["layerType"].astype(str)) == "RoPE" for node in nodes)


def cache_shapes(compiled: ov.CompiledModel, config: DecoderConfig) -> list[tuple[list[int], ov.Type]]:
    """Of one block, without the number of blocks: keys and values of each layer in turn."""
    caches = compiled.inputs[len(INPUTS) : len(INPUTS) + 2 * config.num_layers]
    return [([int(str(size)) for size in list(each.partial_shape)[1:]], each.element_type) for each in caches]
