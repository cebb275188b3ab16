"""Settings of the engine, read here and nowhere else."""

import os
import socket
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from sluice.ring.settings import ServiceSettings, load_settings

ENVIRONMENT = "SLUICE_ENGINE_"


class EngineSettings(ServiceSettings):
    """Computes tokens: one model, one device. Bind an address, tell it to the routers, and that is all."""

    model: str = Field(description="folder or hub id of the model")
    name: str | None = Field(None, description="served name of the model; default: the folder's")
    listen: str = Field(
        "tcp://127.0.0.1:*", description="address of the inbox: ipc:///path or tcp://host:port (port *: any)"
    )
    advertise: str | None = Field(None, description="address by which others reach the inbox; default: the bound one")
    id: str = Field(
        default_factory=lambda: f"engine-{socket.gethostname()}-{os.getpid()}", description="name of this process"
    )

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="of weights and KV cache; auto: float32 on a CPU, the model's own on a GPU"
    )
    attention: Literal["auto", "reference", "cpu"] = Field(
        "auto", description="attention backend; auto: the best one for the device"
    )
    threads: int = Field(0, ge=0, le=1024, description="CPU threads of a step; 0: all cores but one")
    weights: Literal["checkpoint", "random"] = Field(
        "checkpoint", description="random: for benchmarks of a model's shape; the folder needs no weights"
    )

    tokens_per_block: int = Field(16, ge=1, le=1024, description="tokens in a block of the KV cache")
    kv_cache_tokens: int | None = Field(
        None, ge=1, description="size of the KV cache in tokens; default: by kv_memory_fraction"
    )
    kv_memory_fraction: float | None = Field(
        None,
        gt=0,
        le=0.95,
        description="part of the memory left after loading that the KV cache gets; default: 0.3 on a CPU, 0.9 on a GPU",
    )
    max_attention_window: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (),
        description="tokens that a token sees at most: one number, or several that are repeated over the layers; "
        "a model's own sliding window holds too",
    )
    block_reuse: bool = Field(True, description="reuse the blocks of prompts that begin alike")

    max_batch_size: int = Field(64, ge=1, le=4096, description="sequences in a step, and with memory, at most")
    max_tokens_per_step: int = Field(
        512, ge=1, le=1 << 20, validate_default=True, description="tokens that a step computes, at most"
    )
    chunked_context: bool = Field(True, description="let a long prompt fill up steps instead of taking one to itself")
    max_requests: int = Field(256, ge=1, le=1 << 20, description="live requests at most; more are refused (OVERLOADED)")

    drain_timeout: float = Field(10.0, ge=0, description="seconds that live requests have to end after SIGTERM")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level logged")

    @field_validator("max_attention_window", mode="before")
    @classmethod
    def _one_number_is_a_list(cls, found: Any) -> Any:
        return (found,) if isinstance(found, int) else found

    @field_validator("max_tokens_per_step")
    @classmethod
    def _a_step_holds_the_batch(cls, tokens: int, info: ValidationInfo) -> int:
        if tokens < info.data.get("max_batch_size", 1):
            raise ValueError(f"must be at least max_batch_size, {info.data['max_batch_size']}")
        return tokens


def read_settings(argv: Sequence[str] | None = None) -> EngineSettings:
    """From flags, environment (SLUICE_ENGINE_…), YAML file, defaults. Ends the process on bad input."""
    return load_settings(EngineSettings, "python -m engine_worker", ENVIRONMENT, argv)
