"""Mistral (arXiv:2310.06825)."""

from collections.abc import Mapping
from typing import Any

from engine_worker.models.config import DecoderConfig, read_decoder
from engine_worker.models.llama import Llama
from engine_worker.models.windows import mistral_windows


class Mistral(Llama):
    """Llama with a sliding window over every layer."""

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        """From config.json. Raises CheckpointError."""
        return read_decoder(raw, mlp_bias=False, read_windows=mistral_windows)
