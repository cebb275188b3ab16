"""Translates an `ExecutorConfig` to arguments of `GenerationExecutor.create`."""

import logging
from typing import Any

from sluice import executor
from sluice.trtllm.config import (
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    KvCacheConfig,
    LogitsPostProcessorConfig,
    NoAdapters,
    ParallelConfig,
    PeftCacheConfig,
    SchedulerConfig,
)
from sluice.trtllm.debug_tensors import debug_names
from sluice.trtllm.enums import BatchingType, CapacitySchedulerPolicy
from sluice.trtllm.options import (
    OptionError,
    UnsupportedOptionError,
    changed_without_effect,
    refuse_added,
    refuse_changed,
    translated,
)
from sluice.trtllm.processors import DYNAMIC, processor
from sluice.trtllm.speculation import DecodingConfig
from sluice.wire.tensors import HIDDEN_STATES, LAYER_PREFIX

log = logging.getLogger("sluice.trtllm")

OWNER = LogitsPostProcessorConfig.__name__
OUTPUTS = "a model has hidden_states and layers.N; the engine's setting output_tensors defines functions of your own"


def ring_arguments(config: ExecutorConfig) -> dict[str, Any]:
    """Arguments of `GenerationExecutor.create`. Raises UnsupportedOptionError."""
    _check(config)
    processors = _processors(config.logits_post_processor_config)
    engine_args = _replicates(config.logits_post_processor_config, processors)
    if config.enable_trt_overlap:
        engine_args["overlap"] = True
    outputs = config.additional_model_outputs or ()
    layers = {layer for output in outputs if (layer := _layer(output.name)) is not None}
    if layers:
        engine_args["output_layers"] = sorted(layers)
    router_args = {} if config.max_queue_size is None else {"max_waiting": config.max_queue_size}
    return {
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        "enable_chunked_context": _flag(config.enable_chunked_context),
        "kv_cache_config": _kv_cache(config.kv_cache_config),
        "scheduler_config": _scheduler(config.scheduler_config, _policy(config)),
        "peft_cache_config": _adapters(config.peft_cache_config) if has_adapters(config) else None,
        # At least one, because requests may ask for their performance metrics.
        "iter_stats_max_iterations": max(1, config.iter_stats_max_iterations, config.request_stats_max_iterations),
        **processors,
        "engine_args": engine_args,
        "router_args": router_args,
    }


def _flag(value: bool) -> bool | None:
    """None for the default NOT_SET."""
    return value if isinstance(value, bool) else None


def has_adapters(config: ExecutorConfig) -> bool:
    """Whether engines serve LoRA adapters."""
    return config.peft_cache_config != NoAdapters()


def _layer(name: str) -> int | None:
    """The N of a name layers.N; None for other names."""
    number = name.removeprefix(LAYER_PREFIX)
    return int(number) if number != name and number.isascii() and number.isdigit() else None


def is_static(config: ExecutorConfig) -> bool:
    """Whether engines use static batching."""
    policy = config.scheduler_config.capacity_scheduler_policy
    return config.batching_type is BatchingType.STATIC or policy is CapacitySchedulerPolicy.STATIC_BATCH


def _policy(config: ExecutorConfig) -> CapacitySchedulerPolicy:
    if is_static(config):
        if config.max_beam_width > 1:
            reason = "beam search needs in-flight batching"
            raise UnsupportedOptionError(f"ExecutorConfig.max_beam_width = {config.max_beam_width}", reason)
        return CapacitySchedulerPolicy.STATIC_BATCH
    if config.max_beam_width > 1:
        # The only policy that supports beams. It may preempt requests, unlike the default, but that changes no token.
        return CapacitySchedulerPolicy.MAX_UTILIZATION
    return config.scheduler_config.capacity_scheduler_policy


def _check(config: ExecutorConfig) -> None:
    refuse_added(config)
    # Logits and hidden states can be requested whether or not the configuration announces them.
    refuse_changed(config)
    for output in config.additional_model_outputs or ():
        if output.name != HIDDEN_STATES and _layer(output.name) is None:
            raise UnsupportedOptionError(f"ExecutorConfig.additional_model_outputs: {output.name!r}", OUTPUTS)
    if config.spec_dec_config is not None and config.spec_dec_config.fast_logits:
        raise UnsupportedOptionError("SpeculativeDecodingConfig.fast_logits", "no draft model runs in another process")
    debug_names(config.debug_config)
    _check_decoding(config.decoding_config)
    _check_parallel(config.parallel_config)
    _log_without_effect(config)


def _log_without_effect(config: ExecutorConfig) -> None:
    """Log options that are set, affect no result, and have no counterpart."""
    changed = [
        *changed_without_effect(config),
        *(f"peft_cache_config.{name}" for name in changed_without_effect(config.peft_cache_config)),
        *(f"kv_cache_config.{name}" for name in changed_without_effect(config.kv_cache_config)),
    ]
    if config.extended_runtime_perf_knob_config != ExtendedRuntimePerfKnobConfig():
        changed.append("extended_runtime_perf_knob_config")
    if config.guided_decoding_config is not None and config.guided_decoding_config.stop_token_ids is not None:
        changed.append("guided_decoding_config.stop_token_ids")
    for name in changed:
        log.warning("ExecutorConfig.%s has no effect", name)


def _check_decoding(config: DecodingConfig | None) -> None:
    if config is None or config.decoding_mode is None:
        return
    mode = config.decoding_mode
    if mode.isMedusa() or mode.isLookahead() or mode.isExplicitDraftTokens() or mode.isEagle():
        raise UnsupportedOptionError(
            f"DecodingConfig.decoding_mode = {mode!r}",
            "draft tokens can only come from n-grams, from the engine's setting draft_model, or with a request",
        )


def _check_parallel(config: ParallelConfig | None) -> None:
    if config is None:
        return
    refuse_changed(config)
    if config.orchestrator_config is not None:
        refuse_changed(config.orchestrator_config)


def _kv_cache(config: KvCacheConfig) -> executor.KvCacheConfig:
    refuse_changed(config)
    return translated(executor.KvCacheConfig, config)


def _adapters(config: PeftCacheConfig) -> executor.PeftCacheConfig:
    refuse_changed(config)
    # Without lora_prefetch_dir, which this process reads (LoraTasks): its folders may have TensorRT-LLM's files.
    return translated(executor.PeftCacheConfig, config, lora_prefetch_dir=None)


def _scheduler(config: SchedulerConfig, policy: CapacitySchedulerPolicy) -> executor.SchedulerConfig:
    dynamic = config.dynamic_batch_config
    if dynamic is not None and (dynamic.enable_batch_size_tuning or dynamic.enable_max_num_tokens_tuning):
        raise UnsupportedOptionError(
            "SchedulerConfig.dynamic_batch_config", "max_batch_size and max_num_tokens are fixed"
        )
    chunking = config.context_chunking_policy
    return executor.SchedulerConfig(
        policy.name, None if chunking is None else executor.ContextChunkingPolicy[chunking.name]
    )


def _processors(config: LogitsPostProcessorConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    functions = config.processor_map or {}
    if DYNAMIC in functions:
        raise OptionError(f"{OWNER}.processor_map: the name {DYNAMIC!r} is reserved for Request.logits_post_processor")
    named = {name: processor(f"{OWNER}.processor_map[{name!r}]", function) for name, function in functions.items()}
    batched = None
    if config.processor_batched is not None:
        batched = processor(f"{OWNER}.processor_batched", config.processor_batched, batched=True)
    return {"logits_processors": named, "logits_processor_batched": batched}


def _replicates(config: LogitsPostProcessorConfig | None, processors: dict[str, Any]) -> dict[str, Any]:
    """The engine's setting for `replicate`: off if any function runs in this program, which only rank 0 calls."""
    functions = [*processors.get("logits_processors", {}).values(), processors.get("logits_processor_batched")]
    functions = [function for function in functions if function is not None]
    if config is None or not functions:
        return {}
    importable = all(isinstance(function, str) for function in functions)
    return {"logits_processor_replicate": config.replicate and importable}
