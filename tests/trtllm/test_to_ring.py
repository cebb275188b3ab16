"""Translation of an executor's configuration: the settings of the ring, and which options are refused."""

import logging

import pytest

import sluice.trtllm as trtllm
from sluice import executor
from sluice.trtllm.to_ring import is_static, ring_arguments
from tests.fakes.trtllm_processors import only_42, only_43

POLICIES = trtllm.CapacitySchedulerPolicy


def test_the_default() -> None:
    arguments = ring_arguments(trtllm.ExecutorConfig())
    assert arguments["scheduler_config"].engine_args() == {"capacity_scheduler_policy": "guaranteed_no_evict"}
    assert arguments["kv_cache_config"] == executor.KvCacheConfig()
    assert (arguments["engine_args"], arguments["router_args"], arguments["enable_chunked_context"]) == ({}, {}, None)


def test_partial_reuse_may_be_turned_off() -> None:
    config = trtllm.KvCacheConfig(enable_partial_reuse=False, copy_on_partial_reuse=False)
    assert ring_arguments(trtllm.ExecutorConfig(kv_cache_config=config)) == ring_arguments(trtllm.ExecutorConfig())


def test_settings() -> None:
    chunking = trtllm.ContextChunkingPolicy.EQUAL_PROGRESS
    config = trtllm.ExecutorConfig(
        scheduler_config=trtllm.SchedulerConfig(POLICIES.MAX_UTILIZATION, chunking),
        kv_cache_config=trtllm.KvCacheConfig(
            False, 64, [32], host_cache_size=1024, free_gpu_memory_fraction=0.5, event_buffer_max_size=16
        ),
        enable_chunked_context=True,
        max_batch_size=8,
        max_num_tokens=128,
        max_queue_size=5,
        enable_trt_overlap=True,
        request_stats_max_iterations=2000,
    )
    arguments = ring_arguments(config)
    assert arguments["scheduler_config"].engine_args() == {
        "capacity_scheduler_policy": "max_utilization",
        "context_chunking_policy": "equal_progress",
    }
    assert arguments["kv_cache_config"].engine_args() == {
        "kv_cache_tokens": 64,
        "kv_memory_fraction": 0.5,
        "block_reuse": False,
        "kv_host_memory": 1024,
        "max_attention_window": (32,),
        "kv_event_buffer": 16,
    }
    assert (arguments["max_batch_size"], arguments["max_num_tokens"], arguments["enable_chunked_context"]) == (
        8,
        128,
        True,
    )
    assert (arguments["engine_args"], arguments["router_args"]) == ({"overlap": True}, {"max_waiting": 5})
    assert arguments["iter_stats_max_iterations"] == 2000


@pytest.mark.parametrize("chosen", [True, False])
def test_chunking_can_be_turned_off(chosen) -> None:
    assert ring_arguments(trtllm.ExecutorConfig(enable_chunked_context=chosen))["enable_chunked_context"] is chosen
    assert ring_arguments(trtllm.ExecutorConfig())["enable_chunked_context"] is None
    assert trtllm.ExecutorConfig().enable_chunked_context == False  # noqa: E712


def test_static_batches() -> None:
    config = trtllm.ExecutorConfig(batching_type=trtllm.BatchingType.STATIC)
    assert ring_arguments(config)["scheduler_config"].engine_args() == {"capacity_scheduler_policy": "static_batch"}
    assert is_static(config)
    assert is_static(trtllm.ExecutorConfig(scheduler_config=trtllm.SchedulerConfig(POLICIES.STATIC_BATCH)))
    assert not is_static(trtllm.ExecutorConfig())


def test_processors_by_name() -> None:
    processors = trtllm.LogitsPostProcessorConfig({"a": only_42, "b": "my_module:my_function"}, only_43)
    arguments = ring_arguments(trtllm.ExecutorConfig(logits_post_processor_config=processors))
    module = "tests.fakes.trtllm_processors"
    assert arguments["logits_processors"] == {"a": f"{module}:only_42", "b": "my_module:my_function"}
    assert arguments["logits_processor_batched"] == f"{module}:only_43"
    assert arguments["engine_args"] == {"logits_processor_replicate": True}


def test_processors_on_rank_0_alone() -> None:
    processors = trtllm.LogitsPostProcessorConfig({"a": only_42}, replicate=False)
    arguments = ring_arguments(trtllm.ExecutorConfig(logits_post_processor_config=processors))
    assert arguments["engine_args"]["logits_processor_replicate"] is False
    without = trtllm.LogitsPostProcessorConfig()
    assert ring_arguments(trtllm.ExecutorConfig(logits_post_processor_config=without))["engine_args"] == {}


def test_functions_that_engines_cannot_import_are_not_replicated() -> None:
    calls = []

    def complete(*args):
        calls.append(args)

    def without_client_id(request_id, logits, ids, stream):
        calls.append((request_id, logits, ids, stream))

    config = trtllm.ExecutorConfig()
    config.logits_post_processor_map = {"a": only_42, "complete": complete, "without_client_id": without_client_id}
    config.logits_post_processor_batched = lambda ids, *_: calls.append(ids)
    ring_options = ring_arguments(config)
    assert ring_options["engine_args"] == {"logits_processor_replicate": False}
    by_name = ring_options["logits_processors"]
    assert by_name["a"] == "tests.fakes.trtllm_processors:only_42"
    by_name["complete"]("ab-7", "logits", [[1]], None, 5)
    by_name["without_client_id"]("ab-7/1", "logits", [[1]], None, 5)
    ring_options["logits_processor_batched"](["ab-8", "ab-9"], [], [], None, [])
    assert calls == [(7, "logits", [[1]], 0, 5), (7, "logits", [[1]], 0), [8, 9]]


def test_deprecated_names_of_processors() -> None:
    config = trtllm.ExecutorConfig()
    assert (config.logits_post_processor_map, config.logits_post_processor_batched) == (None, None)
    config.logits_post_processor_map = {"a": only_42}
    config.logits_post_processor_batched = only_43
    assert config.logits_post_processor_config == trtllm.LogitsPostProcessorConfig({"a": only_42}, only_43)
    assert (config.logits_post_processor_map, config.logits_post_processor_batched) == ({"a": only_42}, only_43)


def test_announced_layers_become_engine_settings() -> None:
    outputs = [trtllm.AdditionalModelOutput(name) for name in ("layers.12", "hidden_states", "layers.3", "layers.12")]
    arguments = ring_arguments(trtllm.ExecutorConfig(additional_model_outputs=outputs))
    assert arguments["engine_args"] == {"output_layers": [3, 12]}


def processors(**options) -> dict:
    return {"logits_post_processor_config": trtllm.LogitsPostProcessorConfig(**options)}


def cache(**options) -> dict:
    return {"kv_cache_config": trtllm.KvCacheConfig(**options)}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (processors(processor_batched=7), "processor_batched = 7"),
        (processors(processor_map={"a": None}), r"processor_map\['a'\]"),
        (cache(sink_token_length=4), "sink_token_length"),
        (cache(onboard_blocks=False), "onboard_blocks"),
        (cache(use_uvm=True), "use_uvm"),
        (cache(max_gpu_total_bytes=1 << 30), "max_gpu_total_bytes"),
        (
            {"peft_cache_config": trtllm.PeftCacheConfig(max_pages_per_block_host=4)},
            r"PeftCacheConfig\.max_pages_per_block_host = 4",
        ),
        (
            {"debug_config": trtllm.DebugConfig(debug_tensor_names=["test"])},
            "debug_tensor_names: 'test': .* engines can write input_ids, .*, logits",
        ),
        *(
            ({"additional_model_outputs": [trtllm.AdditionalModelOutput(name)]}, f"additional_model_outputs: {name!r}")
            for name in ("layers.", "layers.-1", "layers.x", "layers.²", "encoder_output")
        ),
        ({"gpu_weights_percent": 0.5}, "gpu_weights_percent"),
        ({"use_gpu_direct_storage": True}, "use_gpu_direct_storage"),
        ({"fail_fast_on_attention_window_too_large": True}, "fail_fast"),
        ({"spec_dec_config": trtllm.SpeculativeDecodingConfig(True)}, "fast_logits"),
        ({"decoding_config": trtllm.DecodingConfig(trtllm.DecodingMode.Medusa())}, "decoding_mode"),
        ({"parallel_config": trtllm.ParallelConfig(device_ids=[0])}, "device_ids"),
        ({"parallel_config": trtllm.ParallelConfig(num_nodes=2)}, "num_nodes"),
        ({"cache_transceiver_config": trtllm.CacheTransceiverConfig()}, "cache_transceiver_config"),
        (
            {
                "scheduler_config": trtllm.SchedulerConfig(
                    dynamic_batch_config=trtllm.DynamicBatchConfig(True, False, 8)
                )
            },
            "dynamic",
        ),
    ],
)
def test_unsupported_options(options, named) -> None:
    with pytest.raises(NotImplementedError, match=named):
        ring_arguments(trtllm.ExecutorConfig(**options))


def test_adapters_are_served_if_their_memory_is_configured(tmp_path) -> None:
    assert ring_arguments(trtllm.ExecutorConfig())["peft_cache_config"] is None
    cache_config = trtllm.PeftCacheConfig(max_adapter_size=16, num_put_workers=2, host_cache_size=1 << 20)
    assert ring_arguments(trtllm.ExecutorConfig(peft_cache_config=cache_config))["peft_cache_config"].engine_args() == {
        "lora": True,
        "lora_max_adapter_size": 16,
        "lora_host_cache_size": 1 << 20,
        "lora_num_put_workers": 2,
    }
    changed = trtllm.ExecutorConfig()
    assert isinstance(changed.peft_cache_config, trtllm.PeftCacheConfig)
    changed.peft_cache_config.num_device_module_layer = 96
    args = ring_arguments(changed)["peft_cache_config"].engine_args()
    assert args["lora_num_device_module_layer"] == 96
    assert "lora_num_host_module_layer" not in args
    assert ring_arguments(trtllm.ExecutorConfig(peft_cache_config=trtllm.PeftCacheConfig()))["peft_cache_config"]


def test_beams_need_max_utilization() -> None:
    scheduler = ring_arguments(trtllm.ExecutorConfig(4))["scheduler_config"]
    assert scheduler.engine_args() == {"capacity_scheduler_policy": "max_utilization"}
    with pytest.raises(NotImplementedError, match="max_beam_width = 4"):
        ring_arguments(trtllm.ExecutorConfig(4, batching_type=trtllm.BatchingType.STATIC))


def test_an_unknown_attribute() -> None:
    config = trtllm.ExecutorConfig()
    config.logits_post_processors = {}
    with pytest.raises(NotImplementedError, match=r"ExecutorConfig\.logits_post_processors"):
        ring_arguments(config)


def test_an_orchestrator_and_neutral_options() -> None:
    orchestrator = trtllm.OrchestratorConfig(True, "/opt/worker")
    mode = trtllm.CommunicationMode.ORCHESTRATOR
    config = trtllm.ExecutorConfig(
        parallel_config=trtllm.ParallelConfig(communication_mode=mode, orchestrator_config=orchestrator),
        decoding_config=trtllm.DecodingConfig(trtllm.DecodingMode.TopKTopP()),
        debug_config=trtllm.DebugConfig(),
    )
    assert ring_arguments(config) == ring_arguments(trtllm.ExecutorConfig())


def test_options_without_effect_are_logged(caplog) -> None:
    peft = trtllm.PeftCacheConfig(num_ensure_workers=4, num_copy_streams=2)
    config = trtllm.ExecutorConfig(recv_poll_period_ms=5, peft_cache_config=peft)
    config.kv_cache_config.attention_dp_events_gather_period_ms = 1
    config.extended_runtime_perf_knob_config.multi_block_mode = False
    with caplog.at_level(logging.WARNING, "sluice.trtllm"):
        assert ring_arguments(config) == ring_arguments(
            trtllm.ExecutorConfig(peft_cache_config=trtllm.PeftCacheConfig())
        )
    assert [record.message for record in caplog.records] == [
        "ExecutorConfig.recv_poll_period_ms has no effect",
        "ExecutorConfig.peft_cache_config.num_ensure_workers has no effect",
        "ExecutorConfig.peft_cache_config.num_copy_streams has no effect",
        "ExecutorConfig.kv_cache_config.attention_dp_events_gather_period_ms has no effect",
        "ExecutorConfig.extended_runtime_perf_knob_config has no effect",
    ]
