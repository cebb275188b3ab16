"""Options with TensorRT-LLM's names set the right fields of a request and the right settings of an engine."""

import json
from dataclasses import fields
from datetime import timedelta

import numpy as np
import pytest

from sluice.client.requests import build_spec
from sluice.executor import (
    AdditionalModelOutput,
    CapacitySchedulerPolicy,
    ContextChunkingPolicy,
    GenerationRequest,
    GuidedDecodingParams,
    KvCacheConfig,
    KvCacheRetentionConfig,
    LoRARequest,
    PromptAdapterRequest,
    SamplingParams,
    SchedulerConfig,
    TokenRangeRetentionConfig,
)
from sluice.settings.describe import settings_of
from sluice.settings.services import EngineSettings
from sluice.v1 import generation_pb2 as pb

SAMPLING = {
    "max_tokens": 7,
    "min_tokens": 2,
    "end_id": 5,
    "ignore_eos": True,
    "stop": "x",
    "stop_token_ids": [3],
    "include_stop_str_in_output": True,
    "bad": ["y"],
    "bad_token_ids": [4],
    "allowed_token_ids": [6, 7],
    "embedding_bias": {1: 0.5},
    "logits_processor": "mine",
    "n": 2,
    "best_of": 3,
    "use_beam_search": True,
    "temperature": 0.5,
    "top_k": 4,
    "top_p": 0.5,
    "min_p": 0.25,
    "seed": 9,
    "repetition_penalty": 1.5,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.25,
    "no_repeat_ngram_size": 2,
    "logprobs": 3,
    "prompt_logprobs": 2,
    "return_context_logits": True,
    "return_generation_logits": True,
    "additional_model_outputs": [AdditionalModelOutput(name="hidden", gather_context=True)],
    "guided_decoding": GuidedDecodingParams(regex="a+"),
    "add_special_tokens": False,
    "truncate_prompt_tokens": 8,
    "skip_special_tokens": False,
    "stream_interval": 4,
}
"""A value other than the default for each field of SamplingParams that does not require another field."""


def spec(params: SamplingParams) -> pb.GenerationSpec:
    return build_spec("x", params.options())


@pytest.mark.parametrize("name", [each.name for each in fields(SamplingParams)])
def test_no_sampling_parameter_is_dropped(name) -> None:
    if name in ("length_penalty", "early_stopping", "beam_search_diversity_rate"):
        plain = SamplingParams(use_beam_search=True, n=2)
        changed = SamplingParams(use_beam_search=True, n=2, **{name: 1})
    else:
        plain, changed = SamplingParams(), SamplingParams(**{name: SAMPLING[name]})
    assert spec(changed) != spec(plain)


def test_sampling_parameters_set_their_fields() -> None:
    found = spec(
        SamplingParams(
            max_tokens=9,
            stop=["a", "b"],
            stop_token_ids=[7],
            bad="no",
            embedding_bias={3: -1.5},
            include_stop_str_in_output=True,
            temperature=0.0,
            top_k=1,
            seed=0,
            logprobs=0,
            skip_special_tokens=False,
            guided_decoding=GuidedDecodingParams(json={"type": "object"}),
        )
    )
    assert found.stopping.max_tokens == 9
    assert list(found.stopping.stop) == ["a", "b"]
    assert list(found.stopping.stop_token_ids) == [7]
    assert found.stopping.include_stop_in_output
    assert list(found.sampling.bad_words) == ["no"]
    assert dict(found.sampling.logit_bias) == {3: -1.5}
    for name in ("temperature", "top_k", "seed"):
        assert found.sampling.HasField(name), name
    assert not found.sampling.HasField("top_p")
    assert found.output.HasField("logprobs")
    assert found.output.skip_special_tokens is False
    assert json.loads(found.guided.json_schema) == {"type": "object"}


def test_guided_choice() -> None:
    found = spec(SamplingParams(guided_decoding=GuidedDecodingParams(choice=["yes", "no"])))
    assert list(found.guided.choice.choices) == ["yes", "no"]


def test_default_max_tokens() -> None:
    assert spec(SamplingParams()).stopping.max_tokens == 32
    assert not spec(SamplingParams(max_tokens=None)).stopping.HasField("max_tokens")


@pytest.mark.parametrize(
    ("given", "ignore_eos", "stops"),
    [
        ({}, False, []),
        ({"end_id": 5}, True, [5]),
        ({"end_id": 0, "stop_token_ids": [9]}, True, [9, 0]),
        ({"end_id": -1}, True, []),
        ({"end_id": 5, "ignore_eos": True, "stop_token_ids": [9]}, True, [9]),
    ],
)
def test_end_id_replaces_eos(given, ignore_eos, stops) -> None:
    found = spec(SamplingParams(**given)).stopping
    assert (found.ignore_eos, list(found.stop_token_ids)) == (ignore_eos, stops)


def test_beams_and_best_of() -> None:
    beams = spec(SamplingParams(use_beam_search=True, n=2, best_of=4, length_penalty=0.5, early_stopping=1))
    assert (beams.n, beams.HasField("best_of")) == (2, False)
    assert (beams.sampling.beam_search.width, beams.sampling.beam_search.length_penalty) == (4, 0.5)
    assert beams.sampling.beam_search.early_stopping is True
    assert beams.sampling.beam_search.exhaustive is False
    exhaustive = spec(SamplingParams(use_beam_search=True, n=2, early_stopping=2, beam_search_diversity_rate=0.5))
    assert exhaustive.sampling.beam_search.width == 2
    assert exhaustive.sampling.beam_search.exhaustive is True
    assert exhaustive.sampling.beam_search.early_stopping is False
    assert exhaustive.sampling.beam_search.diversity_rate == 0.5
    best = spec(SamplingParams(n=2, best_of=4))
    assert (best.n, best.best_of, best.sampling.HasField("beam_search")) == (2, 4, False)


@pytest.mark.parametrize("given", [{"n": 3, "best_of": 2}, {"length_penalty": 1.0}, {"early_stopping": True}])
def test_contradictory_options(given) -> None:
    with pytest.raises(ValueError, match=next(reversed(given))):
        SamplingParams(**given)


@pytest.mark.parametrize("guides", [{}, {"regex": "a", "grammar": "b"}])
def test_exactly_one_guide(guides) -> None:
    with pytest.raises(ValueError, match="exactly one of json"):
        GuidedDecodingParams(**guides)


def test_unknown_parameter() -> None:
    with pytest.raises(TypeError, match="top_p_decay"):
        SamplingParams(top_p_decay=0.5)


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
    found = build_spec(MESSAGES, GenerationRequest(MESSAGES, **CHAT).client_options("id")).chat
    assert json.loads(found.tools_json) == CHAT["tools"]
    assert dict(found.template_kwargs) == CHAT["chat_template_kwargs"]
    assert found.continue_final_message
    for name, value in CHAT.items():
        with pytest.raises(TypeError):
            build_spec("x", GenerationRequest("x", **{name: value}).client_options("id"))


def test_options_of_a_request() -> None:
    assert {*REQUEST, *CHAT} == {each.name for each in fields(GenerationRequest)} - {
        "inputs",
        "prompt_token_ids",
        "id",
        "sampling_params",
        "streaming",
        "return_all_generated_tokens",
        "return_perf_metrics",
    }
    found = build_spec("x", GenerationRequest("x", **REQUEST).client_options("id"))
    assert (found.request_id, found.lora_id, found.model, found.priority) == ("id", "mine", "m", pb.PRIORITY_HIGH)
    assert found.prompt_adapter_id == "terse"
    assert found.time_limit.ToTimedelta() == timedelta(seconds=1.5)
    assert (found.kv_cache.salt, found.client_id) == ("tenant", 5)
    assert found.speculation == pb.Speculation(
        max_draft_tokens=0,
        draft_token_ids=[3, 4],
        draft_logits=pb.DraftLogits(dtype="float32", data=bytes(24)),
        acceptance_threshold=0.5,
    )
    assert found.output.token_ids


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
    found = build_spec("x", request.client_options("id")).kv_cache
    first, second = found.prompt_retention
    assert (first.start, first.end, first.priority, first.duration.ToTimedelta()) == (0, 4, 100, timedelta(seconds=2))
    assert (second.start, second.HasField("end"), second.priority) == (4, False, 0)
    assert second.duration.ToTimedelta() == timedelta(milliseconds=250)
    assert (found.salt, found.decode_priority) == ("a", 5)
    assert found.decode_duration.ToTimedelta() == timedelta(seconds=1)


@pytest.mark.parametrize("inputs", ["abcdef", [7] * 6])
def test_retention_ranges_are_clipped_to_the_prompt(executor, script, inputs) -> None:
    ranges = [(0, 4, 100), (4, 90, 50), (90, None, 10)]
    config = KvCacheRetentionConfig([TokenRangeRetentionConfig(*each) for each in ranges])
    executor.generate(inputs, kv_cache_retention_config=config)
    found = [(each.start, each.end, each.priority) for each in script.seen[-1].spec.kv_cache.prompt_retention]
    assert found == [(0, 4, 100), (4, 6, 50)]


def test_retention_ranges_of_a_chat_are_not_clipped(executor, script) -> None:
    config = KvCacheRetentionConfig([TokenRangeRetentionConfig(0, 1000, 100)])
    executor.generate([{"role": "user", "content": "x"}], kv_cache_retention_config=config)
    (found,) = script.seen[-1].spec.kv_cache.prompt_retention
    assert found.end == 1000


@pytest.mark.parametrize(("config", "expected"), [({}, None), ({"decode_duration_ms": 5}, 35)])
def test_default_decode_priority(config, expected) -> None:
    request = GenerationRequest("x", kv_cache_retention_config=KvCacheRetentionConfig(**config))
    found = build_spec("x", request.client_options("id")).kv_cache
    assert (found.decode_priority if found.HasField("decode_priority") else None) == expected


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
