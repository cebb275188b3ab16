"""How a model is run."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RunnerConfig:
    """Options of `load_runner`."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    device_index: int = 0
    """Which of the GPUs."""
    ranks_here: int = 1
    """Processes on this machine that compute this model together, and share its cores and its memory."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Of weights, activations and KV cache. auto: float32 on a CPU, where others need the reference attention; the
    checkpoint's own on CUDA."""
    attention: Literal["auto", "flash", "varlen", "triton", "reference", "cpu"] = "auto"
    """auto: the first that runs here, see `engine_worker.attention.choice`."""
    weights: Literal["checkpoint", "random"] = "checkpoint"
    """random: drawn from `weights_seed`, for benchmarks of a shape; the folder needs no weights."""
    weights_seed: int = 0
    tokens_per_block: int = 0
    """0: 16, or what the attention backend needs."""
    kv_cache_tokens: int | None = None
    """Size of the KV cache, at most; None sizes it by memory."""
    kv_memory_fraction: float | None = None
    """Share of the memory that is free after loading, for the KV cache, at most. None: an equal share of 0.5 on a CPU
    and of 0.9 on CUDA, where there is no `kv_cache_tokens`."""
    engines_here: int = 1
    """Engines that share this machine's memory."""
    engines_per_gpu: int = 1
    """Engines that share this one's GPUs."""
    kv_host_memory: int = 0
    """Bytes of host memory for blocks that are evicted from the KV cache."""
    max_batch_size: int = 64
    """Sequences in a step; a KV cache sized by memory alone holds this many of full length at most."""
    max_tokens_per_step: int = 2048
    max_attention_window: tuple[int, ...] = ()
    """Tokens that a token sees at most, in each layer; fewer than layers are repeated over them. The model's own
    windows hold too."""
    overlap: bool | None = None
    """Whether a step is launched before the results of the one before it are looked at. None: on CUDA."""
    cuda_graphs: bool = True
    """Whether generation steps on CUDA are captured as graphs where they can be."""
    fused_kernels: bool = True
    """Whether Triton kernels on CUDA replace torch's operations between matrix products, in sampling and on the way
    into the KV cache, where they are right."""
    threads: int | None = None
    """CPU threads of one operation, of all ranks here together. None: all cores this process may use but one, which the
    services around it need."""
