"""Requests to an executor with a real ring."""

import sys
import threading
import traceback
from datetime import timedelta

import pytest
import torch
from tokenizers import Tokenizer

import sluice.trtllm as trtllm
from sluice import tiny_model
from tests.fakes.processes import wait_until
from tests.trtllm.running import GREEDY, LIMIT, PROMPT, results, run, start

pytestmark = pytest.mark.process

Finish = trtllm.FinishReason


def test_a_complete_output_begins_with_the_prompt(executor) -> None:
    (result,) = results(executor)
    assert result.output_token_ids == [PROMPT + GREEDY]
    assert (result.finish_reasons, result.is_sequence_final, result.log_probs) == ([Finish.LENGTH], True, None)
    (result,) = results(executor, output_config=trtllm.OutputConfig(exclude_input_from_output=True))
    assert result.output_token_ids == [GREEDY]


def test_a_stream_has_a_response_per_token(executor) -> None:
    partials = results(executor, streaming=True, output_config=trtllm.OutputConfig(return_log_probs=True))
    assert [result.output_token_ids for result in partials] == [[[token]] for token in GREEDY]
    assert [result.is_final for result in partials] == [False] * 4 + [True]
    assert [result.finish_reasons[0] for result in partials] == [Finish.NOT_FINISHED] * 4 + [Finish.LENGTH]
    assert [len(result.log_probs[0]) for result in partials] == [1, 2, 3, 4, 5]
    assert partials[-1].cum_log_probs == [pytest.approx(sum(partials[-1].log_probs[0]))]
    assert all(value < 0 for value in partials[-1].log_probs[0])


def test_a_stream_that_repeats_all_tokens(executor) -> None:
    partials = results(executor, streaming=True, return_all_generated_tokens=True)
    assert [result.output_token_ids[0] for result in partials] == [GREEDY[:count] for count in range(1, 6)]


@pytest.mark.parametrize("streaming", [False, True])
def test_finish_reasons(executor, streaming) -> None:
    def tokens_and_reason(**options):
        config = trtllm.OutputConfig(exclude_input_from_output=True, return_log_probs=True)
        partials = results(executor, streaming=streaming, output_config=config, **options)
        tokens = [token for result in partials for token in result.output_token_ids[0]]
        assert len(partials[-1].log_probs[0]) == len(tokens)
        return tokens, partials[-1].finish_reasons[0]

    assert tokens_and_reason(end_id=16) == (GREEDY[:3], Finish.END_ID)
    assert tokens_and_reason(stop_words=[[16]]) == (GREEDY[:4], Finish.STOP_WORDS)
    assert tokens_and_reason(stop_words=[[220, 16]]) == (GREEDY[:4], Finish.STOP_WORDS)
    assert tokens_and_reason(bad_words=[[2]])[0][0] != 2


def test_several_sequences(executor) -> None:
    sampling = trtllm.SamplingConfig(top_k=50, temperature=1.5, num_return_sequences=3)
    sequences = results(executor, sampling_config=sampling)
    assert [result.sequence_index for result in sequences] == [0, 1, 2]
    assert [result.is_final for result in sequences] == [False, False, True]
    assert len({tuple(result.output_token_ids[0]) for result in sequences}) == 3
    repeated = results(executor, sampling_config=sampling)
    assert [result.output_token_ids for result in repeated] == [result.output_token_ids for result in sequences]


@pytest.mark.parametrize("streaming", [False, True])
def test_beams_are_one_result(executor, streaming) -> None:
    sampling = trtllm.SamplingConfig(3, length_penalty=0.5, num_return_sequences=2)
    config = trtllm.OutputConfig(exclude_input_from_output=True, return_log_probs=True)
    (result,) = results(executor, 6, streaming=streaming, sampling_config=sampling, output_config=config)
    assert result.is_sequence_final
    assert [len(ids) for ids in result.output_token_ids] == [6, 6]
    assert result.cum_log_probs == [pytest.approx(sum(values)) for values in result.log_probs]
    assert result.cum_log_probs == sorted(result.cum_log_probs, reverse=True)
    assert result.finish_reasons == [Finish.LENGTH] * 2


def test_the_number_of_ready_responses(executor) -> None:
    complete = executor.enqueue_request(trtllm.Request(PROMPT, 4, num_return_sequences=2))
    stream = executor.enqueue_request(trtllm.Request(PROMPT, 5, streaming=True))
    ended = executor.enqueue_request(trtllm.Request(PROMPT, 5, streaming=True, end_id=16))
    assert wait_until(lambda: executor.get_num_responses_ready() == 2 + 5 + 4)
    expected = {complete: 2, stream: 5, ended: 4}
    assert {request_id: executor.get_num_responses_ready(request_id) for request_id in expected} == expected
    assert [len(responses) for responses in executor.await_responses(list(expected), LIMIT)] == [2, 5, 4]
    assert executor.get_num_responses_ready() == 0


def test_overloads_of_await_responses(executor) -> None:
    ids = executor.enqueue_requests([trtllm.Request(PROMPT, 3), trtllm.Request(PROMPT, 3, client_id=7)])
    (first,) = executor.await_responses(id=ids[0], timeout=LIMIT)
    (second,) = executor.await_responses(LIMIT)
    assert [first.request_id, second.request_id] == ids
    assert (first.client_id, second.client_id) == (None, 7)
    assert executor.await_responses(timedelta(milliseconds=1)) == []
    assert executor.await_responses(timeout=0.001) == []
    ((repeated,), _) = executor.await_responses(ids=ids, timeout=LIMIT)
    assert repeated.error_msg == f"ReqId {ids[0]} has already been processed and was terminated."
    with pytest.raises(ValueError, match="never enqueued"):
        executor.await_responses(10**6)
    for arguments, options in [((1, 2, 3), {}), (("x", "y"), {}), ((), {"request_id": 1})]:
        with pytest.raises(TypeError, match="await_responses accepts"):
            executor.await_responses(*arguments, **options)


def test_a_cancelled_request(executor) -> None:
    request_id = executor.enqueue_request(
        trtllm.Request(PROMPT, 1500, streaming=True, logits_post_processor_name="slow")
    )
    first = executor.await_responses(request_id, LIMIT)
    executor.cancel_request(request_id)
    while not first[-1].result.is_final:
        first += executor.await_responses(request_id, LIMIT)
    assert first[-1].result.finish_reasons == [Finish.CANCELLED]
    assert len(first) < 1500
    executor.cancel_request(request_id)


def test_allotted_time(executor) -> None:
    (result,) = results(executor, 1500, allotted_time_ms=timedelta(milliseconds=100))
    assert result.finish_reasons == [Finish.TIMED_OUT]


def test_a_bias(executor) -> None:
    bias = torch.zeros(4096)
    bias[10] = torch.finfo(torch.float32).max
    assert results(executor, embedding_bias=bias)[0].output_token_ids == [PROMPT + [10] * 5]
    (response,) = run(executor, embedding_bias=torch.ones(1))
    assert "embedding bias shape is not as expected" in response.error_msg


def test_processors(executor) -> None:
    (result,) = results(executor, logits_post_processor_name="only_42", client_id=123)
    assert result.output_token_ids == [PROMPT + [42] * 5]
    name = trtllm.Request.BATCHED_POST_PROCESSOR_NAME
    assert results(executor, logits_post_processor_name=name)[0].output_token_ids == [PROMPT + [43] * 5]


def test_guides(executor) -> None:
    kind = trtllm.GuidedDecodingParams.GuideType.REGEX
    guide = trtllm.GuidedDecodingParams(kind, "[0-9]{3}")
    (result,) = results(executor, 20, guided_decoding_params=guide, output_config=trtllm.OutputConfig())
    assert result.finish_reasons == [Finish.END_ID]
    text = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json")).decode(
        result.output_token_ids[0][len(PROMPT) :]
    )
    assert len(text) == 3
    assert text.isdigit()


def test_an_error_of_the_server_is_in_the_response(executor) -> None:
    (response,) = run(executor, logits_post_processor_name="only_44")
    assert "only_44" in response.error_msg


def test_tensors_in_the_shapes_of_tensorrt_llm(executor) -> None:
    outputs = [trtllm.AdditionalModelOutput(name, True) for name in ("hidden_states", "layers.4")]
    config = trtllm.OutputConfig(
        return_context_logits=True, return_generation_logits=True, additional_model_outputs=outputs
    )
    (complete,) = results(executor, output_config=config)
    vocab = complete.context_logits.shape[1]
    assert (complete.context_logits.shape, complete.generation_logits.shape) == ((4, vocab), (1, 5, vocab))
    assert complete.generation_logits[0].argmax(-1).tolist() == GREEDY
    torch.testing.assert_close(complete.generation_logits[0, 0], complete.context_logits[-1])
    shapes = {output.name: tuple(output.output.shape) for output in complete.additional_outputs}
    hidden = shapes["hidden_states"][2]
    assert shapes == {
        f"{prefix}{name}": (*rows, hidden)
        for name in ("hidden_states", "layers.4")
        for prefix, rows in (("context_", (4,)), ("", (1, 5)))
    }
    partials = results(executor, output_config=config, streaming=True)
    assert [partial.generation_logits.shape for partial in partials] == [(1, 1, vocab)] * 5
    assert [partial.output_token_ids for partial in partials] == [[[token]] for token in GREEDY]
    torch.testing.assert_close(
        torch.cat([partial.generation_logits[:, 0] for partial in partials]), complete.generation_logits[0]
    )


def test_a_request_with_an_unsupported_option_is_not_enqueued(executor) -> None:
    for option in ({"multimodal_embedding": torch.ones(2, 2)}, {"lora_config": trtllm.LoraConfig(1)}):
        with pytest.raises(NotImplementedError, match=next(iter(option))):
            executor.enqueue_request(trtllm.Request(PROMPT, 1, **option))
    assert executor.get_num_responses_ready() == 0


def functions(thread: threading.Thread) -> set[str]:
    """Names of the functions that the thread is executing."""
    frame = sys._current_frames().get(thread.ident or 0)
    return {caller.f_code.co_name for caller, _ in traceback.walk_stack(frame)} if frame is not None else set()


def test_shutdown_ends_waits_and_calls_after_it_raise() -> None:
    executor = start()
    request_id = executor.enqueue_request(trtllm.Request(PROMPT, 5))
    assert executor.await_responses(request_id, LIMIT)
    received = []
    waiting = threading.Thread(target=lambda: received.append(executor.await_responses()))
    waiting.start()
    # Wait until the thread has passed the check that would raise after the shutdown.
    assert wait_until(lambda: "_await_any" in functions(waiting))
    assert executor.can_enqueue_requests()
    executor.shutdown()
    waiting.join(LIMIT.total_seconds())
    assert received == [[]]
    assert not executor.can_enqueue_requests()
    for call in (
        lambda: executor.enqueue_request(trtllm.Request(PROMPT, 5)),
        executor.await_responses,
        executor.get_latest_iteration_stats,
        executor.get_latest_request_stats,
        executor.get_latest_debug_tensors,
        lambda: executor.cancel_request(request_id),
        executor.get_num_responses_ready,
    ):
        with pytest.raises(RuntimeError, match="shut down"):
            call()
    executor.shutdown()


def test_a_path_without_a_checkpoint() -> None:
    config = trtllm.ExecutorConfig()
    with pytest.raises(RuntimeError, match="File does not exist: Bla"):
        trtllm.Executor("Bla", trtllm.ModelType.DECODER_ONLY, config)
    for arguments in [
        (tiny_model.path(), trtllm.ModelType.ENCODER_ONLY, config),
        (tiny_model.path(), tiny_model.path(), trtllm.ModelType.ENCODER_DECODER, config),
        (b"engine", "{}", trtllm.ModelType.DECODER_ONLY, config),
    ]:
        with pytest.raises(NotImplementedError, match="DECODER_ONLY"):
            trtllm.Executor(*arguments)
