"""Llama, and the families that differ from it only in their configuration: Mistral and Qwen2."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from engine_worker.models.config import DecoderConfig, mistral_windows, qwen_windows, read_decoder
from engine_worker.models.decoder import CausalLM


class Llama(CausalLM):
    """Llama 2 and 3 (arXiv:2302.13971, 2407.21783). Optional biases; rope scaling linear or llama3."""

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        return read_decoder(raw, mlp_bias=True)


class Mistral(CausalLM):
    """Llama with a sliding window in every layer (arXiv:2310.06825)."""

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        return read_decoder(raw, read_windows=mistral_windows)


class Qwen2(CausalLM):
    """Qwen2 and Qwen2.5, dense: Llama with biased queries, keys and values; sliding windows in some layers
    (arXiv:2407.10671)."""

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> DecoderConfig:
        return replace(read_decoder(raw, read_windows=qwen_windows), attention_bias=True, output_bias=False)
