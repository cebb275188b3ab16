"""How chunks become outputs and responses, with several outputs and with log-probabilities."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.client import Chunk, FinishReason, TokenLogprob, Usage
from sluice.executor import GenerationRequest, GenerationResult, Logprob, Response, SamplingParams
from sluice.executor.chunk_queue import ChunkQueue, Ending

USAGE = Usage(1, 2, 0, 0)


class StubExecutor:
    """Records the calls that a result makes of its executor."""

    def __init__(self) -> None:
        self.forgotten: list[int] = []

    def forget(self, request_id: int) -> None:
        self.forgotten.append(request_id)


def make(n: int = 1, **options) -> tuple[GenerationResult, ChunkQueue, StubExecutor]:
    executor, inbox = StubExecutor(), ChunkQueue(lambda: None)
    request = GenerationRequest("x", SamplingParams(n=n), client_id=4, **options)
    return GenerationResult(1, request, inbox, executor), inbox, executor


def logprob(token: int, value: float, *top: tuple[int, float]) -> TokenLogprob:
    alternatives = tuple(
        TokenLogprob(alternative, b"", number, rank, ()) for rank, (alternative, number) in enumerate(top, 1)
    )
    return TokenLogprob(token, b"", value, 3, alternatives)


def test_a_read_returns_one_response_per_output() -> None:
    result, inbox, executor = make(n=3)
    inbox.put(Chunk(index=2, text="a", token_ids=(1,)))
    inbox.put(Chunk(index=0, text="b", token_ids=(2,)))
    inbox.put(Chunk(index=2, text="c", token_ids=(3, 4)))
    responses = result.read()
    assert [
        (answer.result.sequence_index, answer.result.text, answer.result.output_token_ids) for answer in responses
    ] == [
        (0, "b", [[2]]),
        (2, "ac", [[1, 3, 4]]),
    ]
    assert [output.text_diff for output in result.outputs] == ["b", "", "ac"]
    inbox.put(Chunk(index=0, text="d", token_ids=(5,)))
    next(result)
    assert [output.text_diff for output in result.outputs] == ["d", "", ""]
    assert [output.text for output in result.outputs] == ["bd", "", "ac"]
    assert executor.forgotten == []


def test_only_the_last_response_is_final() -> None:
    result, inbox, executor = make(n=2)
    inbox.put(Chunk(index=1, finish_reason=FinishReason.EOS))
    (first,) = result.read()
    assert (first.result.is_sequence_final, first.result.is_final) == (True, False)
    inbox.end(Ending(USAGE), [Chunk(index=0, finish_reason=FinishReason.STOP_TOKEN, stop_token_id=0)])
    (last,) = result.read()
    assert (last.result.is_sequence_final, last.result.is_final) == (True, True)
    assert [output.finish_reason for output in result.outputs] == ["stop", "stop"]
    assert [output.stop_reason for output in result.outputs] == [0, None]
    assert (result.done, result.usage, executor.forgotten) == (True, USAGE, [1])
    assert result.read() == []


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        (SamplingParams(end_id=5), None),
        (SamplingParams(end_id=6, stop_token_ids=[5]), 5),
        (SamplingParams(end_id=5, ignore_eos=True, stop_token_ids=[5]), 5),
    ],
)
def test_an_end_id_is_not_a_stop_reason(params, reason) -> None:
    inbox = ChunkQueue(lambda: None)
    result = GenerationResult(1, GenerationRequest("x", params), inbox, StubExecutor())
    inbox.end(Ending(USAGE), [Chunk(index=0, finish_reason=FinishReason.STOP_TOKEN, stop_token_id=5)])
    (output,) = result.result().outputs
    assert (output.finish_reason, output.stop_reason) == ("stop", reason)


def test_outputs_of_a_complete_result_are_in_order() -> None:
    result, inbox, _ = make(n=2)
    inbox.put(Chunk(index=0, text="a", finish_reason=FinishReason.LENGTH))
    inbox.end(Ending(USAGE), [Chunk(index=1, text="b", finish_reason=FinishReason.TIME_LIMIT)])
    responses = result.read()
    assert [answer.result.is_final for answer in responses] == [False, True]
    assert [answer.result.finish_reasons for answer in responses] == [["length"], ["timeout"]]


def test_an_ending_without_chunks_is_a_final_response() -> None:
    result, inbox, _ = make(n=2)
    for index in range(2):
        inbox.put(Chunk(index=index, finish_reason=FinishReason.EOS))
    assert [answer.result.is_final for answer in result.read()] == [False, False]
    inbox.end(Ending(unfinished="cancelled"))
    assert [answer.result.is_final for answer in result.read()] == [True]
    assert [output.finish_reason for output in result.outputs] == ["stop", "stop"]


def test_a_request_ended_by_this_side_is_cancelled() -> None:
    result, inbox, _ = make(n=2)
    inbox.put(Chunk(index=1, text="b", finish_reason=FinishReason.EOS))
    inbox.end(Ending(unfinished="cancelled"))
    assert [answer.result.finish_reasons for answer in result.read()] == [["cancelled"], ["stop"]]


def test_tokens_before_an_error_are_returned() -> None:
    result, inbox, _ = make()
    inbox.put(Chunk(index=0, text="a"))
    inbox.end(Ending(error=ValueError("it broke")))
    inbox.end(Ending(USAGE))
    first, second = result.read()
    assert (first.result.text, first.result.is_final) == ("a", False)
    assert second == Response(1, 4, error=result.error)
    assert str(result.error) == "request 1: it broke"
    assert result.usage is None


def test_logprobs() -> None:
    result, inbox, _ = make()
    inbox.put(Chunk(index=0, token_ids=(7,), logprobs=(logprob(7, -2.0, (8, -0.5), (9, -1.0)),)))
    result.read()
    output = result.outputs[0]
    assert output.logprobs == output.logprobs_diff
    assert output.logprobs == [{7: Logprob(-2.0, 3), 8: Logprob(-0.5, 1), 9: Logprob(-1.0, 2)}]
    assert output.cumulative_logprob == -2.0
    inbox.put(Chunk(index=0, token_ids=(8,), logprobs=(logprob(8, -1.0),)))
    result.read()
    assert (output.cumulative_logprob, len(output.logprobs), len(output.logprobs_diff)) == (-3.0, 2, 1)
    end = Chunk(index=0, finish_reason=FinishReason.EOS, cumulative_logprob=-3.5)
    inbox.end(Ending(prompt_logprobs=(logprob(1, -1.0),)), [end])
    (response,) = result.read()
    assert response.result.cum_log_probs == [-3.5]
    assert output.prompt_logprobs == [{1: Logprob(-1.0, 3)}]


def test_without_logprobs_there_is_no_sum() -> None:
    result, inbox, _ = make()
    inbox.end(Ending(USAGE), [Chunk(index=0, token_ids=(7,), finish_reason=FinishReason.EOS)])
    result.read()
    assert result.outputs[0].cumulative_logprob is None


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.text(max_size=3), st.lists(st.integers(0, 99), max_size=3), st.booleans())
    ),
    st.booleans(),
)
def test_any_sequence_of_reads_yields_the_same_output(events, returns_all) -> None:
    result, inbox, _ = make(n=3, return_all_generated_tokens=returns_all)
    texts, ids = [""] * 3, [[], [], []]
    expected_texts, expected_ids = [""] * 3, [[], [], []]

    def read() -> None:
        for response in result.read():
            partial = response.result
            index = partial.sequence_index
            texts[index] = partial.text if returns_all else texts[index] + partial.text
            ids[index] = partial.output_token_ids[0] if returns_all else ids[index] + partial.output_token_ids[0]

    for index, text, tokens, reads in events:
        expected_texts[index] += text
        expected_ids[index] += tokens
        inbox.put(Chunk(index=index, text=text, token_ids=tuple(tokens)))
        if reads:
            read()
    for index in (0, 1):
        inbox.put(Chunk(index=index, finish_reason=FinishReason.EOS))
    inbox.end(Ending(USAGE), [Chunk(index=2, finish_reason=FinishReason.EOS)])
    read()
    assert result.done
    assert [output.text for output in result.outputs] == texts == expected_texts
    assert [output.token_ids for output in result.outputs] == ids == expected_ids
