"""Names from TensorRT-LLM's documentation, and arguments that name functions, classes and policies."""

import threading
from dataclasses import fields, replace
from datetime import timedelta

import numpy as np
import pytest
import torch

from sluice.executor import (
    CapacitySchedulerPolicy,
    GenerationExecutor,
    GenerationRequest,
    KvCacheRetentionConfig,
    LoRARequest,
    SamplingParams,
    SchedulerConfig,
)
from sluice.launch import OptionsError, Ring
from sluice.v1 import admin_pb2 as pb
from tests.fakes.processes import wait_until

LIMIT = 60


def test_prompt_token_ids(executor, script) -> None:
    executor.generate(prompt_token_ids=[5, 6])
    executor.generate_async(prompt_token_ids=[5, 6]).result(LIMIT)
    executor.submit(GenerationRequest(prompt_token_ids=[5, 6])).result(LIMIT)
    executor.generate([5, 6], prompt_token_ids=[5, 6])
    assert [list(request.spec.token_ids.ids) for request in script.seen if hasattr(request, "spec")] == [[5, 6]] * 4
    results = executor.generate(prompt_token_ids=[[5], [6, 7]], use_tqdm=False)
    assert [result.prompt_token_ids for result in results] == [[5], [6, 7]]


@pytest.mark.parametrize("entry_point", ["generate", "generate_async", "request"])
def test_conflicting_prompts_under_two_names(executor, entry_point) -> None:
    call = GenerationRequest if entry_point == "request" else getattr(executor, entry_point)
    with pytest.raises(TypeError, match="inputs and prompt_token_ids are the same argument"):
        call([5], prompt_token_ids=[6])
    with pytest.raises(TypeError, match="is missing"):
        call()


def test_a_request_has_its_token_ids_and_its_id() -> None:
    request = GenerationRequest([5, 6])
    assert (request.prompt_token_ids, request.id) == ([5, 6], None)
    assert GenerationRequest("x").prompt_token_ids is None
    assert GenerationRequest([{"role": "user", "content": "x"}]).prompt_token_ids is None
    assert replace(request, streaming=True).prompt_token_ids == [5, 6]
    assert GenerationRequest(prompt_token_ids=[5, 6]) == request
    with pytest.raises(TypeError, match="id"):
        GenerationRequest("x", id=5)


def test_a_result_has_its_request_with_the_id(executor) -> None:
    request = GenerationRequest("x", client_id=3)
    first, second = executor.submit(request), executor.submit(request)
    assert [result.request.id for result in (first, second)] == [first.request_id, second.request_id]
    assert first.request == second.request == request
    assert (request.id, first.prompt, executor.submit(GenerationRequest([5])).prompt) == (None, "x", None)


def test_enqueued_requests_are_read_by_id(executor) -> None:
    assert executor.can_enqueue_requests()
    first = executor.enqueue_request(GenerationRequest("x"))
    other_ids = executor.enqueue_requests([GenerationRequest("y"), GenerationRequest("z")])
    assert len({first, *other_ids}) == 3
    (response,) = executor.await_responses(first, timedelta(seconds=LIMIT))
    assert response.result.is_final
    assert [
        answer.request_id for (answer,) in executor.await_responses(other_ids, timedelta(seconds=LIMIT))
    ] == other_ids
    executor.shutdown()
    assert not executor.can_enqueue_requests()
    with pytest.raises(RuntimeError, match="shut down"):
        executor.enqueue_request(GenerationRequest("x"))


def test_cancel_request(executor, script) -> None:
    script.hangs = True
    request_id = executor.enqueue_request(GenerationRequest("x"))
    assert wait_until(lambda: bool(script.hanging))
    executor.cancel_request(request_id)
    (response,) = executor.await_responses(request_id, LIMIT)
    assert response.result.finish_reasons == ["cancelled"]


def test_a_timedelta_alone_is_a_timeout(executor, script) -> None:
    assert executor.await_responses(timedelta(milliseconds=1)) == []
    request_id = executor.enqueue_request(GenerationRequest("x"))
    (response,) = executor.await_responses(timedelta(seconds=LIMIT))
    assert response.request_id == request_id
    with pytest.raises(TypeError, match="two timeouts"):
        executor.await_responses(timedelta(seconds=1), timedelta(seconds=2))


def test_get_latest_stats(address, script) -> None:
    script.steps = [pb.StreamStepsResponse(steps=[pb.EngineStats(iteration=2), pb.EngineStats(iteration=3)])]
    with GenerationExecutor.connect(address) as executor:
        assert executor.get_latest_stats(timedelta(seconds=LIMIT)).iter == 3
        assert executor.get_latest_stats() is None


async def test_aresult_with_a_timeout(executor, script) -> None:
    script.hangs = True
    result = executor.generate_async("x")
    with pytest.raises(TimeoutError, match=rf"request {result.request_id} did not end within 0.05 s"):
        await result.aresult(timeout=0.05)
    with pytest.raises(TimeoutError, match=r"within 0.05 s"):
        await result.aresult(timedelta(milliseconds=50))
    result.abort()
    assert (await result.aresult(timeout=LIMIT)).done
    assert await result.aresult(timeout=0) is result


def test_policies_by_upper_case_name() -> None:
    for policy in CapacitySchedulerPolicy:
        by_name = SchedulerConfig(policy.name, "EQUAL_PROGRESS").engine_args()
        assert by_name == {"capacity_scheduler_policy": policy.value, "context_chunking_policy": "equal_progress"}


class UserScheduler:
    """A user's scheduler."""


@pytest.mark.parametrize("name", [each.name for each in fields(SchedulerConfig)])
def test_a_class_in_place_of_its_name(name) -> None:
    with pytest.raises(TypeError, match=rf"^{name} must be .* \(got <class '.*UserScheduler'>\)"):
        SchedulerConfig(**{name: UserScheduler})


@pytest.mark.parametrize("processors", [len, [len], ["one", len]])
def test_a_logits_processor_in_place_of_its_name(processors) -> None:
    with pytest.raises(TypeError, match="logits_processor must be the name of a logits processor of the server"):
        SamplingParams(logits_processor=processors)
    SamplingParams(logits_processor=["one", "two"])


def test_an_invalid_logits_processor_stops_those_before_it() -> None:
    with pytest.raises(TypeError, match="the logits processor 'second' must be a function"):
        GenerationExecutor.create(logits_processors={"first": lambda *_: None, "second": 7})
    assert wait_until(lambda: "processor first" not in {thread.name for thread in threading.enumerate()})


def test_a_function_in_place_of_its_name_in_settings_of_services() -> None:
    with pytest.raises(OptionsError, match='engine_args: stats_callback must be a name, such as "module:function"'):
        GenerationExecutor.create(engine_args={"stats_callback": print})
    with pytest.raises(OptionsError, match="router_args: auth must be a name"):
        Ring(router_args={"auth": print})


def test_positional_arguments_in_tensorrt_llms_order_are_refused() -> None:
    with pytest.raises(TypeError, match="streaming must be a bool, not LoRARequest"):
        GenerationRequest("x", SamplingParams(), LoRARequest("mine"))
    with pytest.raises(TypeError, match=r"priority must be None, 'low', 'normal', 'high' \(got 0\.5\)"):
        GenerationRequest("x", priority=0.5)


@pytest.mark.parametrize(
    ("option", "hint"),
    [
        ("query_token_ids", "'inputs'"),
        ("multimodal_params", "images="),
        ("arrival_time", "allotted_time_ms"),
        ("lora_config", "lora_request"),
    ],
)
def test_options_of_other_libraries_name_ours(option, hint) -> None:
    with pytest.raises(TypeError, match=f"unknown option '{option}'; did you mean {hint}"):
        GenerationRequest("x", **{option: 1})


def test_names_of_other_classes_name_ours() -> None:
    with pytest.raises(TypeError, match=r"did you mean KvCacheConfig\(max_tokens=\.\.\.\)"):
        KvCacheRetentionConfig(max_tokens=5)
    with pytest.raises(TypeError, match="unknown option 'engine_dir'; did you mean 'model'"):
        GenerationExecutor.create(engine_dir="x")
    with pytest.raises(TypeError, match=r"create\(logits_processors="):
        SamplingParams(logits_processor=len)


def test_the_text_of_the_only_output(executor) -> None:
    result = executor.generate_async("x", streaming=True)
    assert "".join(part.text_diff for part in result) == result.text == "Hello, world"
    with pytest.raises(AttributeError, match=r"use outputs\[i\]\.text"):
        _ = executor.generate_async("x", SamplingParams(n=2)).text


@pytest.mark.parametrize("kind", [np.array, torch.tensor])
def test_token_ids_of_numpy_and_torch(executor, script, kind) -> None:
    executor.generate(kind([5, 6]))
    executor.generate(prompt_token_ids=[kind(5), kind(6)])
    executor.generate([kind([5, 6])], use_tqdm=False)
    executor.generate(kind([[5, 6], [5, 6]]), SamplingParams(stop_token_ids=kind([3])), use_tqdm=False)
    assert [list(request.spec.token_ids.ids) for request in script.seen] == [[5, 6]] * 5
    assert GenerationRequest(kind([5, 6])).prompt_token_ids == [5, 6]
    with pytest.raises(TypeError, match=r"inputs\[1\] must be an integer \(got 1\.5\)"):
        GenerationRequest([kind(1), 1.5])


def test_images_drafts_and_client_ids_of_several_prompts(executor, script) -> None:
    executor.generate(["a", "b"], images=[[b"1"], None], draft_token_ids=[None, [3]], client_id=[7, 8], use_tqdm=False)
    sent = {each.spec.text: each.spec for each in script.seen}
    assert [len(sent[name].images) for name in "ab"] == [1, 0]
    assert [list(sent[name].speculation.draft_token_ids) for name in "ab"] == [[], [3]]
    assert [sent[name].client_id for name in "ab"] == [7, 8]
    executor.generate("c", images=[b"1"], draft_token_ids=[3])
    with pytest.raises(ValueError, match="images has 1 entries, must have one for each of the 2 inputs"):
        executor.generate(["a", "b"], images=[[b"1"]])
