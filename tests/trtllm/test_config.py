"""Configurations: defaults, order of arguments, checks of every change, pickling."""

import pickle
from dataclasses import asdict, fields
from datetime import timedelta

import pytest

import sluice.trtllm as trtllm
from sluice import executor
from sluice.settings.engine import LoraOptions
from sluice.trtllm.to_ring import ring_arguments

Range = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
XGRAMMAR = trtllm.GuidedDecodingConfig.GuidedDecodingBackend.XGRAMMAR
SAMPLES = [
    trtllm.SchedulerConfig(
        trtllm.CapacitySchedulerPolicy.STATIC_BATCH, None, trtllm.DynamicBatchConfig(True, False, 8)
    ),
    trtllm.KvCacheConfig(False, 64, [32], 4, 0.5, 1024, use_uvm=True),
    trtllm.KvCacheRetentionConfig([Range(0, 2, 30, timedelta(seconds=30))], 80),
    trtllm.PeftCacheConfig(1, 2, device_cache_percent=0.5),
    trtllm.ParallelConfig(device_ids=[0, 1], orchestrator_config=trtllm.OrchestratorConfig(True, "worker")),
    trtllm.DecodingConfig(trtllm.DecodingMode.TopKTopP()),
    trtllm.LookaheadDecodingConfig(3, 5, 7),
    trtllm.EagleConfig([[0, 0], [0, 1]], False, 0.5),
    trtllm.LogitsPostProcessorConfig({"x": "module:function"}, None, False),
    trtllm.GuidedDecodingConfig(XGRAMMAR, ["a", "b"]),
    trtllm.GuidedDecodingParams(trtllm.GuidedDecodingParams.GuideType.REGEX, "a+"),
    trtllm.SpeculativeDecodingConfig(True),
    trtllm.DebugConfig(True, False, ["x"], 3),
    trtllm.CacheTransceiverConfig(trtllm.CacheTransceiverBackendType.UCX, 5),
    trtllm.SamplingConfig(2, top_k=3, num_return_sequences=2),
    trtllm.OutputConfig(True, additional_model_outputs=[trtllm.AdditionalModelOutput("x", True)]),
    trtllm.MultimodalInput([[1]], [2], [3]),
    trtllm.ContextPhaseParams([1], 2),
]


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: type(sample).__name__)
def test_pickled_and_back(sample) -> None:
    assert pickle.loads(pickle.dumps(sample)) == sample


def test_unknown_attributes_of_an_executor_config_are_pickled() -> None:
    config = trtllm.ExecutorConfig(2, batching_type=trtllm.BatchingType.STATIC)
    config.backend = "pytorch"
    config.extended_runtime_perf_knob_config.cuda_graph_mode = True
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.backend == "pytorch"


def test_names_of_other_versions_and_modules() -> None:
    assert trtllm.SchedulerPolicy is trtllm.CapacitySchedulerPolicy
    with pytest.raises(ImportError, match=r"sluice\.trtllm has no LLM: from sluice import LLM"):
        from sluice.trtllm import LLM  # noqa: F401
    with pytest.raises(AttributeError, match=r"no attribute 'Foo'; docs/trtllm\.md lists"):
        trtllm.Foo  # noqa: B018


def test_defaults() -> None:
    config = trtllm.ExecutorConfig()
    assert config.scheduler_config.capacity_scheduler_policy is trtllm.CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
    assert (config.max_beam_width, config.iter_stats_max_iterations, config.request_stats_max_iterations) == (
        1,
        1000,
        0,
    )
    assert config.kv_cache_config == trtllm.KvCacheConfig()
    assert (trtllm.KvCacheConfig().enable_block_reuse, trtllm.KvCacheConfig().free_gpu_memory_fraction) == (True, None)
    assert {getattr(trtllm.SamplingConfig(), field.name) for field in fields(trtllm.SamplingConfig)} == {1, None}


def test_the_memory_for_adapters_has_tensorrt_llms_defaults() -> None:
    """Those of its bindings; an engine replaces None by those of its LLM API, which `sluice.executor` also has."""
    sizes = {"num_host_module_layer": 0, "num_device_module_layer": 0}
    sizes |= {"optimal_adapter_size": 8, "max_adapter_size": 64}
    threads = {"num_put_workers": 1, "num_ensure_workers": 1, "num_copy_streams": 1}
    pages = {"max_pages_per_block_host": 24, "max_pages_per_block_device": 8}
    unset = {"device_cache_percent": None, "host_cache_size": None, "lora_prefetch_dir": None}
    # The order counts, since programs also pass them by position.
    assert list(asdict(trtllm.PeftCacheConfig()).items()) == list((sizes | threads | pages | unset).items())
    in_effect = sizes | threads | unset | {"device_cache_percent": 0.02, "host_cache_size": 1024**3}
    served = asdict(executor.PeftCacheConfig())
    assert served == {name: in_effect[name] for name in served}
    args = ring_arguments(trtllm.ExecutorConfig(peft_cache_config=trtllm.PeftCacheConfig()))
    options = LoraOptions(**args["peft_cache_config"].engine_args())
    assert options.lora
    settings = {name: getattr(options, f"lora_{name.removeprefix('lora_')}") for name in served}
    # An engine writes None for no number of ranks.
    assert settings == {name: value or None for name, value in served.items()}


def test_a_nested_configuration_can_be_changed_in_place() -> None:
    config = trtllm.ExecutorConfig()
    config.kv_cache_config.max_tokens = 42
    assert config.kv_cache_config.max_tokens == 42
    assert trtllm.ExecutorConfig().kv_cache_config.max_tokens is None


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (trtllm.SamplingConfig, "beam_width", 0),
        (trtllm.SamplingConfig, "top_k", -1),
        (trtllm.SamplingConfig, "top_p", 0.0),
        (trtllm.SamplingConfig, "temperature", -0.5),
        (trtllm.SamplingConfig, "num_return_sequences", 0),
        (trtllm.SamplingConfig, "min_p", 1.5),
        (trtllm.KvCacheConfig, "max_tokens", 0),
        (trtllm.KvCacheConfig, "free_gpu_memory_fraction", 1.0),
        (trtllm.KvCacheConfig, "max_attention_window", [4, 0]),
        (trtllm.ExecutorConfig, "max_beam_width", 0),
        (trtllm.ExecutorConfig, "max_seq_idle_microseconds", 0),
    ],
)
def test_a_value_out_of_range_in_the_constructor_and_later(make, name, value) -> None:
    with pytest.raises(RuntimeError, match=f"{make.__name__}.{name} is "):
        make(**{name: value})
    config = make()
    previous = getattr(config, name)
    with pytest.raises(RuntimeError, match=f"{make.__name__}.{name} is "):
        setattr(config, name, value)
    assert getattr(config, name) == previous


def test_more_sequences_than_beams() -> None:
    with pytest.raises(RuntimeError, match="num_return_sequences is 3, must be at most beam_width, which is 2"):
        trtllm.SamplingConfig(2, num_return_sequences=3)
    assert trtllm.SamplingConfig(1, num_return_sequences=3).num_return_sequences == 3


def test_runtime_defaults_fill_unset_fields() -> None:
    defaults = trtllm.RuntimeDefaults([8, 16], 4)
    config = trtllm.KvCacheConfig(sink_token_length=2, runtime_defaults=defaults)
    assert (config.max_attention_window, config.sink_token_length) == ([8, 16], 2)


@pytest.mark.parametrize("ranges", [[(0, 64), (32, 128)], [(0, None), (30, 50)], [(5, 5)], [(-1, 3)]])
def test_token_ranges_do_not_overlap_and_are_not_empty(ranges) -> None:
    with pytest.raises(ValueError, match="token range"):
        trtllm.KvCacheRetentionConfig([Range(start, end, 50) for start, end in ranges])


def test_token_ranges_are_sorted() -> None:
    config = trtllm.KvCacheRetentionConfig([Range(50, 100, 1), Range(30, 40, 2)])
    assert [token_range.token_start for token_range in config.token_range_retention_configs] == [30, 50]


def test_every_guide_type_but_json_needs_a_guide() -> None:
    kinds = trtllm.GuidedDecodingParams.GuideType
    assert trtllm.GuidedDecodingParams(kinds.JSON).guide is None
    with pytest.raises(ValueError, match="REGEX needs a guide"):
        trtllm.GuidedDecodingParams(kinds.REGEX)


@pytest.mark.parametrize("name", ["Auto", "TopK", "TopP", "BeamSearch", "Medusa", "Lookahead", "Eagle"])
def test_decoding_modes(name) -> None:
    mode = getattr(trtllm.DecodingMode, name)()
    modes = ("Auto", "TopK", "TopP", "BeamSearch", "Medusa", "Lookahead", "Eagle")
    assert [getattr(mode, f"is{kind}")() for kind in modes] == [kind == name for kind in modes]
    assert mode.name == name
    assert pickle.loads(pickle.dumps(mode)) == mode


def test_top_k_and_top_p() -> None:
    mode = trtllm.DecodingMode.TopKTopP()
    assert all((mode.isTopK(), mode.isTopP(), mode.isTopKandTopP(), mode.isTopKorTopP()))
    assert not trtllm.DecodingMode.TopK().isTopKandTopP()
    assert mode.name == "TopKTopP"


def test_the_width_of_a_beam_search_is_constant() -> None:
    mode = trtllm.DecodingMode.BeamSearch()
    assert mode.useVariableBeamWidthSearch(False) == mode
    with pytest.raises(NotImplementedError, match="constant"):
        mode.useVariableBeamWidthSearch(True)


def test_lookahead_resources() -> None:
    config = trtllm.LookaheadDecodingConfig
    # TensorRT-LLM's documentation states 83 draft tokens for these values.
    assert config(7, 7, 7).calculate_speculative_resource() == (84, 7, 83, 6)
    assert config.calculate_speculative_resource_tuple(1, 1, 0) == (1, 1, 0, 0)


def test_backends_by_name() -> None:
    backends = trtllm.CacheTransceiverBackendType
    assert backends.from_string("ucx") is backends.from_string("UCX") is backends.UCX
    with pytest.raises(RuntimeError, match="Invalid backend type: Ucx"):
        backends.from_string("Ucx")


def test_the_configuration_of_a_mode_sets_the_mode() -> None:
    config = trtllm.DecodingConfig()
    config.medusa_choices = [[0, 0]]
    assert config.decoding_mode.isMedusa()
    config.lookahead_decoding_config = trtllm.LookaheadDecodingConfig(3, 5, 7)
    assert config.decoding_mode.isLookahead()
