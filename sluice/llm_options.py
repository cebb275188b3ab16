"""Options of vLLM's and TensorRT-LLM's `LLM`: neutral values are accepted, others mapped to ours or refused by name."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

log = logging.getLogger("sluice.llm")

DTYPES = {"half": "float16", "float": "float32"}
ENGINE_ARGS = {
    "tensor_parallel_size": "tensor_parallel",
    "dtype": "dtype",
    "gpu_memory_utilization": "kv_memory_fraction",
    "block_size": "tokens_per_block",
    "enable_prefix_caching": "block_reuse",
    "max_lora_rank": "lora_max_adapter_size",
    "enforce_eager": "cuda_graphs",
    "max_model_len": "max_context_tokens",
    "max_seq_len": "max_context_tokens",
}
"""Options that are settings of engines, with the setting."""
RENAMED = {
    "max_num_seqs": "max_batch_size",
    "max_num_batched_tokens": "max_num_tokens",
    "enable_chunked_prefill": "enable_chunked_context",
    "batched_logits_processor": "logits_processor_batched",
}
"""Options that `GenerationExecutor.create` has under another name."""
NO_EFFECT = {
    "swap_space": "KvCacheConfig(host_cache_size=...) keeps evicted blocks in main memory",
    "disable_log_stats": "get_stats returns statistics, which are not logged",
    "disable_custom_all_reduce": "it affects only the speed",
    "disable_log_requests": "the log never contains prompts",
    "enable_prompt_embeds": "prompts may always be embeddings",
    "gather_generation_logits": "requests that ask for generation logits get them",
    "max_beam_width": "SamplingParams(use_beam_search=True, best_of=...) sets the width of each request",
    "guided_decoding_backend": "guides need no backend to be chosen",
    "print_iter_log": "get_stats returns the statistics of steps",
    "enable_iter_perf_stats": "get_stats returns the statistics of steps",
    **dict.fromkeys(
        (
            "max_seq_len_to_capture",
            "cuda_graph_config",
            "torch_compile_config",
            "disable_overlap_scheduler",
            "attn_backend",
            "moe_config",
            "enable_trtllm_sampler",
            "enable_dbo",
        ),
        "it affects only the speed",
    ),
}
"""Options that do not change what a program receives, and why they have no effect."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "trust_remote_code": (False, None),
    "seed": (0, None),
    "tokenizer": (None,),
    "tokenizer_mode": ("auto",),
    "tokenizer_revision": (None,),
    "skip_tokenizer_init": (False,),
    "quantization": (None,),
    "pipeline_parallel_size": (1,),
    "data_parallel_size": (1,),
    "moe_expert_parallel_size": (None, 1, -1),
    "moe_tensor_parallel_size": (None, 1, -1),
    "moe_cluster_parallel_size": (None, 1, -1),
    "enable_expert_parallel": (False,),
    "enable_attention_dp": (False,),
    "distributed_executor_backend": (None, "mp", "uni"),
    "kv_cache_dtype": ("auto",),
    "cpu_offload_gb": (0,),
    "load_format": ("auto", "safetensors"),
    "device": ("auto", None),
    "task": ("auto", "generate"),
    "runner": ("auto", "generate"),
    "backend": (None, "pytorch"),
    "limit_mm_per_prompt": (None,),
    "hf_overrides": (None,),
    "speculative_config": (None,),
    "compilation_config": (None,),
    "download_dir": (None,),
    "lora_config": (None,),
}
"""The only values that are accepted of options without a counterpart."""
INSTEAD = {
    "trust_remote_code": "code of checkpoints is never run",
    "seed": "a seed belongs to a request: SamplingParams(seed=...)",
    "quantization": "use engine_args={'quantize': 'int8'}",
    "kv_cache_dtype": "use engine_args={'kv_cache_dtype': ...}",
    "data_parallel_size": "use engines=...",
    "speculative_config": "use draft_model=... or engine_args={'max_draft_tokens': ...}",
    "tokenizer": "the tokenizer is that of the checkpoint",
    "download_dir": "set HF_HOME",
    "backend": "use engine_args={'backend': ...}",
    "lora_config": "use enable_lora=True, peft_cache_config=PeftCacheConfig(max_adapter_size=...)",
}
"""What to write in place of other values."""


def own_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `GenerationExecutor.create` for options that may have the names of vLLM or TensorRT-LLM.

    Raises NotImplementedError for a value without a counterpart, TypeError for an option under two names.
    """
    found: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in options.items():
        if name in ENGINE_ARGS:
            _add(settings, name, ENGINE_ARGS[name], _converted(name, value))
        elif name in RENAMED:
            if options.get(RENAMED[name]) is not None and value is not None:
                raise _given_twice(name, RENAMED[name])
            if value is not None:
                found[RENAMED[name]] = value
        elif name in NO_EFFECT:
            log.warning("LLM(%s=%r) has no effect: %s", name, value, NO_EFFECT[name])
        elif name in NEUTRAL:
            _check_neutral(name, value)
        else:
            found[name] = value
    for name, value in (found.get("engine_args") or {}).items():
        _add(settings, f"engine_args[{name!r}]", name, value)
    return found | ({"engine_args": settings} if settings else {})


def _add(options: dict[str, Any], given: str, name: str, value: Any) -> None:
    if options.get(name) is not None and value is not None:
        raise _given_twice(given, name)
    if value is not None:
        options[name] = value


def _given_twice(given: str, name: str) -> TypeError:
    return TypeError(f"LLM({given}=...) sets {name!r}, which another option sets too: give one of them")


def _converted(name: str, value: Any) -> Any:
    """The value of an engine's setting; None: the engine's default."""
    defaults: dict[str, Callable[[], Any]] = {
        "tensor_parallel_size": lambda: None if value == 1 else value,
        "dtype": lambda: _dtype(value),
        "enforce_eager": lambda: False if value else None,
    }
    return defaults[name]() if name in defaults else value


def _dtype(value: Any) -> str | None:
    # A torch.dtype reads "torch.float16".
    name = str(value).removeprefix("torch.")
    return None if value in (None, "auto") else DTYPES.get(name, name)


def _check_neutral(name: str, value: Any) -> None:
    if value not in NEUTRAL[name]:
        accepted = " or ".join(map(repr, NEUTRAL[name]))
        instead = f"; {INSTEAD[name]}" if name in INSTEAD else ""
        raise NotImplementedError(f"LLM({name}={value!r}): must be {accepted}{instead}")
    log.info("LLM(%s=%r) is the only behaviour", name, value)
