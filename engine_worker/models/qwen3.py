"""Qwen3, dense and with a mixture of experts (arXiv:2505.09388)."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from engine_worker.attention.backend import AttentionBackend
from engine_worker.layers.mlp import SwiGLU
from engine_worker.layers.moe import ALIGNED, ExpertShape, SparseMoE
from engine_worker.layers.shard import Place
from engine_worker.models.config import DecoderConfig, qwen_moe_windows, qwen_windows, read_decoder, size
from engine_worker.models.decoder import CausalLM, FeedForward
from sluice.checkpoint.errors import CheckpointError

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""Names of the option with the number of experts: Qwen's, and the one that transformers writes."""


class Qwen3(CausalLM):
    """Llama with an RMSNorm on each query and key head, and an independent head_dim; sliding windows in some layers."""

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        return read_decoder({"head_dim": 128} | dict(raw), read_windows=qwen_windows, head_norms=True)


@dataclass(frozen=True, slots=True)
class Qwen3MoeConfig(DecoderConfig):
    """A Qwen3 decoder with some sparse layers."""

    experts: ExpertShape
    sparse: tuple[bool, ...]
    """Whether each layer has experts."""


class Qwen3Moe(CausalLM):
    """Qwen3 with a mixture of experts in place of the SwiGLU, in all layers or some."""

    def __init__(self, config: Qwen3MoeConfig, backend: AttentionBackend, place: Place) -> None:
        def mlp(layer: int) -> FeedForward:
            if config.sparse[layer]:
                return SparseMoE(config.hidden_size, config.experts, place)
            return SwiGLU(config.hidden_size, config.intermediate_size, place, bias=False)

        super().__init__(config, backend, place, mlp)

    def freeze(self) -> None:
        super().freeze()
        blocks = [layer.mlp for layer in self.model.layers]
        self.graphs = not any(isinstance(block, SparseMoE) and block.experts.waits_for_device for block in blocks)

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> Qwen3MoeConfig:
        # read_decoder refuses the options of experts, which are read below.
        dense = {name: value for name, value in raw.items() if name not in EXPERT_COUNTS}
        decoder = read_decoder(dense, read_windows=qwen_moe_windows, head_norms=True)
        return Qwen3MoeConfig(
            **{field.name: getattr(decoder, field.name) for field in fields(decoder)},
            experts=_read_experts(raw, decoder.hidden_size),
            sparse=_read_sparse(raw, decoder.num_layers),
        )


def _read_experts(raw: Mapping[str, Any], hidden_size: int) -> ExpertShape:
    shape = ExpertShape(
        num_experts=size(raw, next((name for name in EXPERT_COUNTS if raw.get(name) is not None), EXPERT_COUNTS[0])),
        num_chosen=size(raw, "num_experts_per_tok"),
        intermediate_size=size(raw, "moe_intermediate_size"),
        normalized=bool(raw.get("norm_topk_prob", False)),
    )
    if shape.num_chosen > shape.num_experts:
        raise CheckpointError(
            f"config.json: num_experts_per_tok {shape.num_chosen} is more than the {shape.num_experts} experts"
        )
    for name, value in (("hidden_size", hidden_size), ("moe_intermediate_size", shape.intermediate_size)):
        if value % ALIGNED:
            raise CheckpointError(f"config.json: {name} must be a multiple of {ALIGNED} (got {value})")
    return shape


def _read_sparse(raw: Mapping[str, Any], num_layers: int) -> tuple[bool, ...]:
    step = size(raw, "decoder_sparse_step", 1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise CheckpointError(f"config.json: mlp_only_layers must be a list of layers (got {dense!r})")
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
