"""Options of vLLM's and TensorRT-LLM's `LLM`, and its results, without a ring."""

import logging
from inspect import signature

import numpy as np
import pytest
import torch

from sluice import SamplingParams
from sluice.executor import GenerationExecutor, GenerationRequest, RequestError
from sluice.executor.executor import RING_OPTIONS
from sluice.llm import LLM, SingleResult
from sluice.llm_options import ENGINE_ARGS, NEUTRAL, NO_EFFECT, RENAMED, own_options
from sluice.settings.describe import settings_of
from sluice.settings.services import EngineSettings


@pytest.fixture
def llm(address, monkeypatch):
    executor = GenerationExecutor.connect(address, iter_stats_max_iterations=0, resume_timeout=0)
    monkeypatch.setattr(GenerationExecutor, "create", lambda *_, **__: executor)
    with LLM("model", tensor_parallel_size=1, trust_remote_code=False) as llm:
        yield llm


def test_neutral_options_are_accepted_with_a_log_line(caplog) -> None:
    options = {name: values[0] for name, values in NEUTRAL.items()} | dict.fromkeys(NO_EFFECT, 1)
    with caplog.at_level(logging.INFO, "sluice.llm"):
        assert own_options(options) == {}
    assert len(caplog.records) == len(options)
    assert own_options({"tensor_parallel_size": 1, "dtype": "auto", "enforce_eager": False}) == {}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 1), ("pipeline_parallel_size", 1), ("data_parallel_size", 1), ("dtype", "auto"),
        ("trust_remote_code", False), ("enforce_eager", False), ("seed", 0), ("seed", None), ("quantization", None),
        ("tokenizer", None), ("tokenizer_mode", "auto"), ("skip_tokenizer_init", False), ("kv_cache_dtype", "auto"),
        ("load_format", "auto"), ("swap_space", 4), ("disable_log_stats", True), ("max_model_len", None),
        ("cpu_offload_gb", 0), ("device", "auto"), ("task", "generate"), ("runner", "generate"),
        ("distributed_executor_backend", "mp"), ("backend", "pytorch"), ("download_dir", None),
    ],
)  # fmt: skip
def test_options_of_usual_programs_change_nothing(name, value) -> None:
    """Written down, not read from NEUTRAL: programs for vLLM and TensorRT-LLM have these."""
    assert own_options({name: value}) == {}


def test_max_model_len_limits_the_context_of_the_engines(monkeypatch) -> None:
    started: dict = {}

    def ring(model, **options):
        started.update(options)
        raise ValueError("not today")

    monkeypatch.setattr("sluice.executor.executor.LocalRing", ring)
    for name in ("max_model_len", "max_seq_len"):
        started.clear()
        with pytest.raises(ValueError, match="not today"):
            LLM("model", **{name: 96}, enforce_eager=True, dtype="bfloat16")
        settings = started["engine_args"]
        assert (settings["max_context_tokens"], settings["cuda_graphs"], settings["dtype"]) == (96, False, "bfloat16")


@pytest.mark.parametrize("name", NEUTRAL)
def test_other_values_are_refused_by_name(name) -> None:
    with pytest.raises(NotImplementedError, match=rf"^LLM\({name}='other'\): must be "):
        own_options({name: "other"})


def test_options_with_a_counterpart() -> None:
    assert set(ENGINE_ARGS.values()) <= set(settings_of(EngineSettings))
    assert set(RENAMED.values()) <= signature(GenerationExecutor.create).parameters.keys()
    assert not (RING_OPTIONS & {*ENGINE_ARGS, *RENAMED, *NO_EFFECT, *NEUTRAL})
    found = own_options(
        {
            "tensor_parallel_size": 2,
            "dtype": torch.float16,
            "gpu_memory_utilization": 0.5,
            "max_num_seqs": 8,
            "enforce_eager": True,
            "engine_args": {"threads": 1},
            "engines": 2,
        }
    )
    settings = {"tensor_parallel": 2, "dtype": "float16", "kv_memory_fraction": 0.5, "cuda_graphs": False, "threads": 1}
    assert found == {"max_batch_size": 8, "engines": 2, "engine_args": settings}
    with pytest.raises(TypeError, match="sets 'dtype', which another option sets too"):
        own_options({"dtype": "half", "engine_args": {"dtype": "float32"}})
    with pytest.raises(TypeError, match="sets 'max_batch_size'"):
        own_options({"max_batch_size": 4, "max_num_seqs": 8})


def test_the_result_of_one_prompt_is_also_a_list(llm) -> None:
    result = llm.generate("one prompt")
    assert isinstance(result, SingleResult)
    assert len(result) == 1
    assert [each.outputs[0].text for each in result] == [result[0].outputs[0].text] == ["Hello, world"]
    assert result.outputs[0].text == "Hello, world"
    assert llm.chat([{"role": "user", "content": "x"}])[0].finished
    assert [each.outputs[0].text for each in llm.generate(["a", "b"], use_tqdm=False)] == ["Hello, world"] * 2
    assert llm.generate(prompts="one prompt").outputs[0].text == "Hello, world"
    with pytest.raises(TypeError, match="either inputs or prompts"):
        llm.generate("one", prompts="other")
    with pytest.raises(AttributeError):
        _ = result.nothing


def test_options_of_programs_for_other_libraries() -> None:
    """Those of NVIDIA's quickstart_advanced.py, llm_guided_decoding.py and llm_logits_processor.py."""
    processor = print
    options = {
        "attn_backend": "TRTLLM", "backend": "pytorch", "cuda_graph_config": None, "disable_overlap_scheduler": True,
        "enable_attention_dp": False, "guided_decoding_backend": "xgrammar", "load_format": "auto",
        "max_beam_width": 1, "moe_config": None, "moe_cluster_parallel_size": -1, "moe_expert_parallel_size": -1,
        "moe_tensor_parallel_size": -1, "print_iter_log": False, "speculative_config": None,
        "torch_compile_config": None, "batched_logits_processor": processor,
    }  # fmt: skip
    assert own_options(options) == {"logits_processor_batched": processor}
    with pytest.raises(NotImplementedError, match="peft_cache_config"):
        own_options({"lora_config": object()})
    with pytest.raises(TypeError, match="did you mean logits_processor='batched'"):
        SamplingParams(apply_batched_logits_processor=True)


def test_sampling_params_may_be_changed_before_use() -> None:
    params = SamplingParams(length_penalty=1.0, pad_id=0)
    params.max_tokens = 7
    request = GenerationRequest("x", params)
    params.max_tokens = 9
    assert request.sampling_params.max_tokens == 7
    params.best_of, params.n = 1, 2
    with pytest.raises(ValueError, match="best_of is 1, must be at least n"):
        GenerationRequest("x", params)
    with pytest.raises(AttributeError):
        params.max_token = 3


def test_outputs_without_text(llm) -> None:
    output = llm.generate("x", SamplingParams(detokenize=False)).outputs[0]
    assert (output.text, output.token_ids) == ("", [0, 1, 2])


@pytest.mark.parametrize("make", [np.array, torch.tensor], ids=["numpy", "torch"])
def test_token_ids_may_be_arrays(llm, script, make) -> None:
    ids = make([3, 7])
    params = SamplingParams(bad_token_ids=ids, allowed_token_ids=ids, stop_token_ids=ids)
    for prompt in (ids, {"prompt_token_ids": ids}, [{"prompt_token_ids": ids}], [ids]):
        llm.generate(prompt, params, use_tqdm=False)
        spec = script.seen[-1].spec
        sent = spec.token_ids.ids, spec.sampling.bad_token_ids, spec.sampling.allowed_token_ids
        assert [list(each) for each in (*sent, spec.stopping.stop_token_ids)] == [[3, 7]] * 4
    for prompt in (make([3.5]), {"prompt_token_ids": make([3.5])}):
        with pytest.raises(TypeError, match=r"inputs\[0\] must be an integer \(got 3\.5\)"):
            llm.generate(prompt)
    for name in ("bad_token_ids", "allowed_token_ids", "stop_token_ids"):
        with pytest.raises(RequestError, match=rf"{name}\[0\] must be an integer \(got 3\.5\)"):
            llm.generate("x", SamplingParams(**{name: make([3.5])}))
