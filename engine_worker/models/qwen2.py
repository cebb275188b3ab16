"""Qwen2 and Qwen2.5, dense (arXiv:2407.10671)."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine_worker.models.config import DecoderConfig, read_decoder
from engine_worker.models.llama import Llama
from engine_worker.models.windows import qwen_windows


class Qwen2(Llama):
    """Llama with biased queries, keys and values; sliding windows in some layers."""

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        """From config.json. Raises CheckpointError."""
        return replace(
            read_decoder(raw, mlp_bias=False, read_windows=qwen_windows), attention_bias=True, output_bias=False
        )
