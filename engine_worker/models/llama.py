"""Llama (arXiv:2302.13971, 2407.21783)."""

from collections.abc import Mapping
from typing import Any

import torch

from engine_worker.attention.backend import AttentionBackend
from engine_worker.layers.attention import SelfAttention
from engine_worker.layers.shard import ALONE, Shard
from engine_worker.models.config import DecoderConfig, read_decoder
from engine_worker.models.decoder import CausalLM


class Llama(CausalLM):
    """Optional biases; rope scaling linear or llama3."""

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        def attention(window: int | None) -> SelfAttention:
            return SelfAttention(
                config.hidden_size,
                config.heads,
                backend,
                window,
                bias=config.attention_bias,
                output_bias=config.output_bias,
                dtype=dtype,
                device=device,
                shard=shard,
            )

        super().__init__(config, attention, dtype=dtype, device=device, shard=shard)

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        """From config.json. Raises CheckpointError."""
        return read_decoder(raw, mlp_bias=True)
