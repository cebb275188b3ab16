"""Options of requests and engines, with TensorRT-LLM's names, set the right fields and settings."""

import json
from dataclasses import fields
from datetime import timedelta

import numpy as np
import pytest

from sluice.client.requests import build_spec
from sluice.executor import (
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    GenerationRequest,
    KvCacheConfig,
    KvCacheRetentionConfig,
    LoRARequest,
    PromptAdapterRequest,
    SchedulerConfig,
    TokenRangeRetentionConfig,
)
from sluice.settings.describe import settings_of
from sluice.settings.services import EngineSettings
from sluice.v1 import generation_pb2 as pb

REQUEST = {
    "lora_request": LoRARequest("mine"),
    "kv_cache_retention_config": KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 4, 100)]),
    "priority": "high",
    "allotted_time_ms": 1500,
    "cache_salt": "tenant",
    "model": "m",
    "client_id": 5,
    "max_draft_tokens": 0,
    "draft_token_ids": [3, 4],
    "draft_logits": np.zeros((2, 3), np.float32),
    "acceptance_threshold": 0.5,
    "prompt_table": np.zeros((2, 3), np.float32),
    "prompt_adapter_request": PromptAdapterRequest("terse"),
    "images": [b"png"],
}
CHAT = {
    "tools": [{"type": "function", "function": {"name": "now"}}],
    "chat_template_kwargs": {"enable_thinking": False},
    "continue_final_message": True,
}
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.mark.parametrize("name", REQUEST)
def test_no_option_of_a_request_is_dropped(name) -> None:
    plain = build_spec("x", GenerationRequest("x").client_options("id"))
    assert build_spec("x", GenerationRequest("x", **{name: REQUEST[name]}).client_options("id")) != plain


def test_options_of_a_chat() -> None:
    chat = build_spec(MESSAGES, GenerationRequest(MESSAGES, **CHAT).client_options("id")).chat
    assert json.loads(chat.tools_json) == CHAT["tools"]
    assert dict(chat.template_kwargs) == CHAT["chat_template_kwargs"]
    assert chat.continue_final_message
    for name, value in CHAT.items():
        with pytest.raises(TypeError):
            build_spec("x", GenerationRequest("x", **{name: value}).client_options("id"))


def test_options_of_a_request() -> None:
    assert {*REQUEST, *CHAT} == {field.name for field in fields(GenerationRequest)} - {
        "inputs",
        "prompt_token_ids",
        "id",
        "sampling_params",
        "streaming",
        "return_all_generated_tokens",
        "return_perf_metrics",
    }
    spec = build_spec("x", GenerationRequest("x", **REQUEST).client_options("id"))
    assert (spec.request_id, spec.lora_id, spec.model, spec.priority) == ("id", "mine", "m", pb.PRIORITY_HIGH)
    assert spec.prompt_adapter_id == "terse"
    assert spec.time_limit.ToTimedelta() == timedelta(seconds=1.5)
    assert (spec.kv_cache.salt, spec.client_id) == ("tenant", 5)
    assert spec.speculation == pb.Speculation(
        max_draft_tokens=0,
        draft_token_ids=[3, 4],
        draft_logits=pb.DraftLogits(dtype="float32", data=bytes(24)),
        acceptance_threshold=0.5,
    )
    assert spec.output.token_ids


def test_retention() -> None:
    config = KvCacheRetentionConfig(
        [
            KvCacheRetentionConfig.TokenRangeRetentionConfig(0, 4, 100, timedelta(seconds=2)),
            TokenRangeRetentionConfig(4, None, 0, 250),
        ],
        decode_retention_priority=5,
        decode_duration_ms=1000,
    )
    request = GenerationRequest("x", kv_cache_retention_config=config, cache_salt="a")
    options = build_spec("x", request.client_options("id")).kv_cache
    first, second = options.prompt_retention
    assert (first.start, first.end, first.priority, first.duration.ToTimedelta()) == (0, 4, 100, timedelta(seconds=2))
    assert (second.start, second.HasField("end"), second.priority) == (4, False, 0)
    assert second.duration.ToTimedelta() == timedelta(milliseconds=250)
    assert (options.salt, options.decode_priority) == ("a", 5)
    assert options.decode_duration.ToTimedelta() == timedelta(seconds=1)


@pytest.mark.parametrize("inputs", ["abcdef", [7] * 6])
def test_retention_ranges_are_clipped_to_the_prompt(executor, script, inputs) -> None:
    ranges = [(0, 4, 100), (4, 90, 50), (90, None, 10)]
    config = KvCacheRetentionConfig([TokenRangeRetentionConfig(*token_range) for token_range in ranges])
    executor.generate(inputs, kv_cache_retention_config=config)
    sent_ranges = [(sent.start, sent.end, sent.priority) for sent in script.seen[-1].spec.kv_cache.prompt_retention]
    assert sent_ranges == [(0, 4, 100), (4, 6, 50)]


def test_retention_ranges_of_a_chat_are_not_clipped(executor, script) -> None:
    config = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 1000, 100)])
    executor.generate([{"role": "user", "content": "x"}], kv_cache_retention_config=config)
    (sent_range,) = script.seen[-1].spec.kv_cache.prompt_retention
    assert sent_range.end == 1000


@pytest.mark.parametrize(("config", "expected"), [({}, None), ({"decode_duration_ms": 5}, 35)])
def test_default_decode_priority(config, expected) -> None:
    request = GenerationRequest("x", kv_cache_retention_config=KvCacheRetentionConfig(**config))
    options = build_spec("x", request.client_options("id")).kv_cache
    assert (options.decode_priority if options.HasField("decode_priority") else None) == expected


def test_engine_settings() -> None:
    cache = KvCacheConfig(
        max_tokens=512,
        free_gpu_memory_fraction=0.25,
        enable_block_reuse=False,
        host_cache_size=1 << 20,
        max_attention_window=[64, 128],
        tokens_per_block=8,
    )
    assert cache.engine_args() == {
        "kv_cache_tokens": 512,
        "kv_memory_fraction": 0.25,
        "block_reuse": False,
        "kv_host_memory": 1 << 20,
        "max_attention_window": (64, 128),
        "tokens_per_block": 8,
    }
    scheduler = SchedulerConfig(
        capacity_scheduler_policy=CapacitySchedulerPolicy.STATIC_BATCH,
        context_chunking_policy=ContextChunkingPolicy.EQUAL_PROGRESS,
        micro_batch_scheduler="mine:Micro",
        scheduler="mine:Whole",
    )
    assert scheduler.engine_args() == {
        "capacity_scheduler_policy": "static_batch",
        "context_chunking_policy": "equal_progress",
        "micro_batch_scheduler": "mine:Micro",
        "scheduler": "mine:Whole",
    }
    assert KvCacheConfig().engine_args() == SchedulerConfig().engine_args() == {}
    assert set(cache.engine_args()) | set(scheduler.engine_args()) <= set(settings_of(EngineSettings))
