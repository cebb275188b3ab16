"""Settings of the engine, read here and nowhere else."""

import os
import socket
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, ValidationInfo, field_validator

from engine_worker.parallel.rank_env import RankEnv, read_rank_env
from engine_worker.scheduling.build import POLICIES, SchedulerNames
from engine_worker.scheduling.context import ChunkingPolicy
from sluice.ring.settings import ServiceSettings, load_settings

ENVIRONMENT = "SLUICE_ENGINE_"


class EngineSettings(ServiceSettings):
    """Computes tokens: one model, one device. Bind an address, tell it to the routers, and that is all."""

    model: str = Field(description="folder or hub id of the model")
    name: str | None = Field(None, description="served name of the model; default: the folder's")
    revision: str | None = Field(None, min_length=1, description="branch, tag or commit of a hub model; default: main")
    listen: str = Field(
        "tcp://127.0.0.1:*", description="address of the inbox: ipc:///path or tcp://host:port (port *: any)"
    )
    advertise: str | None = Field(None, description="address by which others reach the inbox; default: the bound one")
    id: str = Field(
        default_factory=lambda: f"engine-{socket.gethostname()}-{os.getpid()}", description="name of this process"
    )

    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: a GPU where there is one")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="of weights and KV cache; auto: float32 on a CPU, which serves no other, the model's own on a GPU",
    )
    attention: Literal["auto", "flash", "varlen", "triton", "reference", "cpu"] = Field(
        "auto", description="attention backend; auto: on a GPU the first of flash, varlen and triton that runs there"
    )
    threads: int = Field(
        0, ge=0, le=1024, description="CPU threads of a step; 0: default_threads, or where that is 0 all cores but one"
    )
    default_threads: int = Field(0, ge=0, le=1024, description="threads where nobody says; for launchers")
    weights: Literal["checkpoint", "random"] = Field(
        "checkpoint", description="random: for benchmarks of a model's shape; the folder needs no weights"
    )

    tensor_parallel: int = Field(
        1,
        ge=1,
        le=256,
        description="ranks that compute the model together: processes, each with its GPU or on the CPU",
    )
    rank_timeout: float = Field(
        60.0, gt=0, description="seconds in which each rank must get on with a step; else all end with an error"
    )
    rank_start_timeout: float = Field(600.0, gt=0, description="seconds in which all ranks must have loaded")

    tokens_per_block: int = Field(
        0, ge=0, le=1024, description="tokens in a block of the KV cache; 0: 16, or what the attention backend needs"
    )
    kv_cache_tokens: int | None = Field(
        None, ge=1, description="size of the KV cache in tokens, at most; default: by kv_memory_fraction"
    )
    kv_memory_fraction: float | None = Field(
        None,
        gt=0,
        le=0.95,
        description="part of the memory left after loading that the KV cache gets, and no more than kv_cache_tokens; "
        "default: an equal share of 0.5 on a CPU, of 0.9 on a GPU, where kv_cache_tokens is not given either",
    )
    engines_here: int = Field(1, ge=1, le=4096, description="engines that share this machine's memory; for launchers")
    engines_per_gpu: int = Field(1, ge=1, le=4096, description="engines that share this one's GPUs; for launchers")
    kv_host_memory: ByteSize = Field(
        ByteSize(0),
        ge=0,
        description="host memory for blocks that are evicted from the KV cache, in bytes or as 8GiB; 0: none",
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
    overlap: bool | None = Field(None, description="plan a step while the one before it is computed; default: on a GPU")
    cuda_graphs: bool = Field(
        True,
        description="on a GPU launch a generation step's kernels as one; takes some memory and seconds at the start",
    )
    fused_kernels: bool = Field(
        True, description="on a GPU use Sluice's Triton kernels beside attention: layers, sampling, KV cache writes"
    )
    chunked_context: bool = Field(True, description="let a long prompt fill up steps instead of taking one to itself")
    context_chunking_policy: ChunkingPolicy = Field(
        "first_come_first_served", description="how long prompts share a step's tokens: one after the other, or evenly"
    )
    capacity_scheduler_policy: str = Field(
        "max_utilization",
        description=f"who may hold memory: {', '.join(POLICIES)} or your own module:Class; see docs/scheduling.md",
    )
    micro_batch_scheduler: str | None = Field(
        None, description="who of them runs in a step: your own module:Class; default: all, under the limits above"
    )
    scheduler: str | None = Field(None, description="both in one: your own module:Class, a RequestScheduler")
    priority_aging_seconds: float = Field(
        30.0, ge=0, le=1e9, description="in which a request that waits gains one priority class; 0: never"
    )
    max_requests: int = Field(256, ge=1, le=1 << 20, description="live requests at most; more are refused (OVERLOADED)")

    stats_callback: str | None = Field(
        None, description="module:function, called with a JSON object for each step and each report of a request"
    )
    metrics_host: str = Field("127.0.0.1", description="interface on which /metrics, /livez and /readyz answer")
    metrics_port: int = Field(0, ge=0, le=65535, description="port for that; 0: none")
    ready_stall: float = Field(
        30.0, gt=0, description="seconds that a step, or requests without one, may take until /readyz says no"
    )
    live_stall: float = Field(120.0, gt=0, description="seconds that a step may take until /livez says no")

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

    @property
    def rank_env(self) -> RankEnv:
        """Which of the ranks this process is. Raises ValueError where torchrun started another number of them."""
        return read_rank_env(self.tensor_parallel, os.environ)

    @property
    def step_threads(self) -> int | None:
        """CPU threads of a step; None: the runner's choice."""
        return self.threads or self.default_threads or None

    @property
    def schedulers(self) -> SchedulerNames:
        """The settings that name them."""
        return SchedulerNames(self.capacity_scheduler_policy, self.micro_batch_scheduler, self.scheduler)

    @field_validator("context_chunking_policy")
    @classmethod
    def _nothing_to_share_out(cls, policy: ChunkingPolicy, info: ValidationInfo) -> ChunkingPolicy:
        if policy != "first_come_first_served" and not info.data.get("chunked_context", True):
            raise ValueError("means nothing without chunked_context")
        return policy

    @field_validator("capacity_scheduler_policy")
    @classmethod
    def _a_policy_or_a_class(cls, name: str) -> str:
        if name not in POLICIES and ":" not in name:
            raise ValueError(f"must be {', '.join(POLICIES)} or module:Class")
        return name

    @field_validator("micro_batch_scheduler", "scheduler")
    @classmethod
    def _a_class(cls, name: str | None, info: ValidationInfo) -> str | None:
        if name is None:
            return None
        if ":" not in name:
            raise ValueError("must be of the form module:Class")
        data = info.data
        others = data.get("capacity_scheduler_policy", "max_utilization"), data.get("micro_batch_scheduler")
        if info.field_name == "scheduler" and others != ("max_utilization", None):
            raise ValueError("stands for capacity_scheduler_policy and micro_batch_scheduler: give it or them")
        return name


def read_settings(argv: Sequence[str] | None = None) -> EngineSettings:
    """From flags, environment (SLUICE_ENGINE_…), YAML file, defaults. Ends the process on bad input."""
    return load_settings(EngineSettings, "python -m engine_worker", ENVIRONMENT, argv)
