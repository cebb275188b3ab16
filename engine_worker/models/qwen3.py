"""Qwen3, dense (arXiv:2505.09388)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine_worker.attention.backend import AttentionBackend
from engine_worker.layers.attention import NormedSelfAttention
from engine_worker.layers.shard import ALONE, Shard
from engine_worker.models.config import DecoderConfig, read_decoder
from engine_worker.models.decoder import CausalLM, FeedForward
from engine_worker.models.windows import qwen_windows


class Qwen3(CausalLM):
    """Llama with an RMSNorm on each query and key head, and a head size of its own; sliding windows in some layers."""

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        mlp: Callable[[int], FeedForward] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        def attention(window: int | None) -> NormedSelfAttention:
            return NormedSelfAttention(
                config.hidden_size,
                config.heads,
                backend,
                window,
                bias=config.attention_bias,
                output_bias=config.output_bias,
                eps=config.rms_norm_eps,
                dtype=dtype,
                device=device,
                shard=shard,
            )

        super().__init__(config, attention, mlp, dtype=dtype, device=device, shard=shard)

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        """From config.json. Raises CheckpointError."""
        return read_decoder({"head_dim": 128} | dict(raw), mlp_bias=False, read_windows=qwen_windows)
