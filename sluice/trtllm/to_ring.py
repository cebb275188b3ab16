"""An `ExecutorConfig` as arguments of `GenerationExecutor.create`."""

import logging
from collections.abc import Sequence
from typing import Any

from sluice import executor
from sluice.ring.tensors import HIDDEN_STATES, LAYER_PREFIX
from sluice.trtllm.cache_config import KvCacheConfig
from sluice.trtllm.config import (
    ExecutorConfig,
    ExtendedRuntimePerfKnobConfig,
    LogitsPostProcessorConfig,
    NoAdapters,
    PeftCacheConfig,
)
from sluice.trtllm.debug_tensors import debug_names
from sluice.trtllm.enums import BatchingType, CapacitySchedulerPolicy
from sluice.trtllm.errors import UnsupportedOptionError, refuse_added, refuse_changed
from sluice.trtllm.parallel import OrchestratorConfig, ParallelConfig
from sluice.trtllm.processors import processor
from sluice.trtllm.scheduler import SchedulerConfig
from sluice.trtllm.speculation import DecodingConfig

log = logging.getLogger("sluice.trtllm")

OUTPUTS = "of a model's own, hidden_states and layers.N; functions of yours are the engine's setting output_tensors"
CONFIG_REASONS = {
    "use_gpu_direct_storage": "it is not implemented",
    "gpu_weights_percent": "weights are always whole on the device",
    "cache_transceiver_config": "context and generation always run in the same engine",
    "mm_embedding_offloading": "prompt embeddings are not implemented",
    "fail_fast_on_attention_window_too_large": "windows are never shortened: a request that does not fit is refused",
}
KV_CACHE_REASONS = {
    "sink_token_length": "attention sinks are not implemented",
    "onboard_blocks": "blocks in host memory are always copied back before use",
    "cross_kv_cache_fraction": "only decoder-only models are served",
    "secondary_offload_min_priority": "blocks of every priority go to host memory",
    "use_uvm": "it is not implemented",
    "max_gpu_total_bytes": "the size of the cache is max_tokens or free_gpu_memory_fraction",
}
PARALLEL_REASONS = {
    "device_ids": "set CUDA_VISIBLE_DEVICES",
    "participant_ids": "there are no MPI ranks: the executor starts its own services",
    "num_nodes": "an executor starts its ring on this machine; GenerationExecutor.connect uses others",
}
ORCHESTRATOR_REASONS = {
    "is_orchestrator": "every executor starts its own services",
    "orch_leader_comm": "there are no MPI ranks: the executor starts its own services",
    "spawn_processes": "every executor starts its own services",
}
PEFT_REASONS = {
    "max_pages_per_block_host": "pages are not grouped into blocks",
    "max_pages_per_block_device": "pages are not grouped into blocks",
}
SPEED_ONLY = ("recv_poll_period_ms", "max_seq_idle_microseconds")
PEFT_SPEED_ONLY = ("num_ensure_workers", "num_copy_streams")
"""Adapters are copied to the device with the step that needs them."""
KV_CACHE_SPEED_ONLY = ("attention_dp_events_gather_period_ms",)


def ring_arguments(config: ExecutorConfig) -> dict[str, Any]:
    """Raises UnsupportedOptionError."""
    _check(config)
    processors = _processors(config.logits_post_processor_config)
    engine_args = _replicates(config.logits_post_processor_config, processors)
    if config.enable_trt_overlap:
        engine_args["overlap"] = True
    layers = {layer for each in config.additional_model_outputs or () if (layer := _layer(each.name)) is not None}
    if layers:
        engine_args["output_layers"] = sorted(layers)
    router_args = {} if config.max_queue_size is None else {"max_waiting": config.max_queue_size}
    return {
        "max_batch_size": config.max_batch_size,
        "max_num_tokens": config.max_num_tokens,
        # The default, False, leaves it to the engine: chunks change no token.
        "enable_chunked_context": config.enable_chunked_context or None,
        "kv_cache_config": _kv_cache(config.kv_cache_config),
        "scheduler_config": _scheduler(config.scheduler_config, _policy(config)),
        "peft_cache_config": _adapters(config.peft_cache_config) if has_adapters(config) else None,
        # At least one, since requests may want their metrics.
        "iter_stats_max_iterations": max(1, config.iter_stats_max_iterations, config.request_stats_max_iterations),
        **processors,
        "engine_args": engine_args,
        "router_args": router_args,
    }


def has_adapters(config: ExecutorConfig) -> bool:
    return config.peft_cache_config != NoAdapters()


def _layer(name: str) -> int | None:
    """N of layers.N; None: the name is another."""
    number = name.removeprefix(LAYER_PREFIX)
    return int(number) if number != name and number.isascii() and number.isdigit() else None


def is_static(config: ExecutorConfig) -> bool:
    policy = config.scheduler_config.capacity_scheduler_policy
    return config.batching_type is BatchingType.STATIC or policy is CapacitySchedulerPolicy.STATIC_BATCH


def _policy(config: ExecutorConfig) -> CapacitySchedulerPolicy:
    if is_static(config):
        if config.max_beam_width > 1:
            reason = "beam search needs in-flight batching"
            raise UnsupportedOptionError(f"ExecutorConfig.max_beam_width = {config.max_beam_width}", reason)
        return CapacitySchedulerPolicy.STATIC_BATCH
    if config.max_beam_width > 1:
        # The only one that knows of forks. A pause, which the default rules out, changes no token.
        return CapacitySchedulerPolicy.MAX_UTILIZATION
    return config.scheduler_config.capacity_scheduler_policy


def _check(config: ExecutorConfig) -> None:
    refuse_added(config)
    defaults = ExecutorConfig()
    # Logits and outputs of the model are there whether or not they were announced.
    refuse_changed(config, defaults, CONFIG_REASONS)
    for each in config.additional_model_outputs or ():
        if each.name != HIDDEN_STATES and _layer(each.name) is None:
            raise UnsupportedOptionError(f"ExecutorConfig.additional_model_outputs: {each.name!r}", OUTPUTS)
    if config.spec_dec_config is not None and config.spec_dec_config.fast_logits:
        raise UnsupportedOptionError("SpeculativeDecodingConfig.fast_logits", "drafts have no logits here")
    debug_names(config.debug_config)
    _check_decoding(config.decoding_config)
    _check_parallel(config.parallel_config)
    _mention_speed(config)


def _mention_speed(config: ExecutorConfig) -> None:
    """Options that change no result, and have no counterpart."""
    knobs = config.extended_runtime_perf_knob_config
    changed = [
        *_changed("", config, ExecutorConfig(), SPEED_ONLY),
        *_changed("peft_cache_config.", config.peft_cache_config, PeftCacheConfig(), PEFT_SPEED_ONLY),
        *_changed("kv_cache_config.", config.kv_cache_config, KvCacheConfig(), KV_CACHE_SPEED_ONLY),
    ]
    if knobs != ExtendedRuntimePerfKnobConfig():
        changed.append("extended_runtime_perf_knob_config")
    if config.guided_decoding_config is not None and config.guided_decoding_config.stop_token_ids is not None:
        changed.append("guided_decoding_config.stop_token_ids")
    for name in changed:
        log.warning("ExecutorConfig.%s has no effect here", name)


def _changed(prefix: str, owner: object, defaults: object, names: Sequence[str]) -> list[str]:
    return [prefix + name for name in names if getattr(owner, name) != getattr(defaults, name)]


def _check_decoding(config: DecodingConfig | None) -> None:
    if config is None or config.decoding_mode is None:
        return
    mode = config.decoding_mode
    if mode.isMedusa() or mode.isLookahead() or mode.isExplicitDraftTokens() or mode.isEagle():
        raise UnsupportedOptionError(
            f"DecodingConfig.decoding_mode = {mode!r}",
            "engines draft by n-grams, by the setting draft_model, or with the drafts of a request",
        )


def _check_parallel(config: ParallelConfig | None) -> None:
    if config is None:
        return
    refuse_changed(config, ParallelConfig(), PARALLEL_REASONS)
    if config.orchestrator_config is not None:
        refuse_changed(config.orchestrator_config, OrchestratorConfig(), ORCHESTRATOR_REASONS)


def _kv_cache(config: KvCacheConfig) -> executor.KvCacheConfig:
    refuse_changed(config, KvCacheConfig(), KV_CACHE_REASONS)
    return executor.KvCacheConfig(
        max_tokens=config.max_tokens,
        free_gpu_memory_fraction=config.free_gpu_memory_fraction,
        enable_block_reuse=config.enable_block_reuse,
        host_cache_size=config.host_cache_size,
        max_attention_window=config.max_attention_window,
        event_buffer_max_size=config.event_buffer_max_size,
    )


def _adapters(config: PeftCacheConfig) -> executor.PeftCacheConfig:
    refuse_changed(config, PeftCacheConfig(), PEFT_REASONS)
    # lora_prefetch_dir is read here: its folders may have TensorRT-LLM's files.
    return executor.PeftCacheConfig(
        max_adapter_size=config.max_adapter_size,
        optimal_adapter_size=config.optimal_adapter_size,
        device_cache_percent=config.device_cache_percent,
        # As there, 0 is unset.
        num_device_module_layer=config.num_device_module_layer or None,
        host_cache_size=config.host_cache_size,
        num_host_module_layer=config.num_host_module_layer or None,
        num_put_workers=config.num_put_workers,
    )


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
    named = {name: processor(f"processor_map[{name!r}]", each) for name, each in (config.processor_map or {}).items()}
    batched = None
    if config.processor_batched is not None:
        batched = processor("processor_batched", config.processor_batched)
    return {"logits_processors": named, "logits_processor_batched": batched}


def _replicates(config: LogitsPostProcessorConfig | None, given: dict[str, Any]) -> dict[str, Any]:
    """Processors of this program are called for rank 0 alone: there is nothing to replicate."""
    found = [*given.get("logits_processors", {}).values(), given.get("logits_processor_batched")]
    found = [each for each in found if each is not None]
    if config is None or not found:
        return {}
    return {"logits_processor_replicate": config.replicate and all(isinstance(each, str) for each in found)}
