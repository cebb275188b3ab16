"""Translation of received chunks to responses, without a ring."""

import numpy as np
import pytest

import sluice.trtllm as trtllm
from sluice import client
from sluice.client import Chunk, TokenLogprob
from sluice.executor import GenerationRequest, GenerationResult, SamplingParams
from sluice.executor.chunk_queue import ChunkQueue, Ending
from sluice.executor.response import GENERATION_LOGITS
from sluice.trtllm.open_request import OpenRequest, RowWidths

VOCABULARY, HIDDEN_SIZE = 8, 4
Finish = trtllm.FinishReason
EVERYTHING = trtllm.OutputConfig(
    return_log_probs=True,
    return_generation_logits=True,
    exclude_input_from_output=True,
    additional_model_outputs=[trtllm.AdditionalModelOutput("hidden_states")],
)


class NoServer:
    """What a result calls; nothing has an effect."""

    def tokenize(self, *_) -> list[int]:
        return []

    def abort_request(self, _) -> None:
        pass

    def forget(self, _) -> None:
        pass


def received(ids: list[int], **end) -> list[Chunk]:
    """Tokens with their tensors and log-probabilities, then the end."""
    shapes = {GENERATION_LOGITS: VOCABULARY, "hidden_states": HIDDEN_SIZE}
    rows = {name: np.array([[token] * width for token in ids], np.float32) for name, width in shapes.items()}
    tensors = [
        Chunk(0, tensor=client.Tensor(0, name, 0, False, array.shape, "float32", array.tobytes()))
        for name, array in rows.items()
        if ids
    ]
    logprobs = tuple(TokenLogprob(token, b"", -float(token), 1, ()) for token in ids)
    return [*tensors, Chunk(0, token_ids=tuple(ids), logprobs=logprobs, **end)]


def responses(chunks: list[Chunk], *, streaming: bool, end_id: int | None) -> list[trtllm.Result]:
    """The responses of a request that received `chunks`, then its end."""
    request = trtllm.Request([1, 2], 9, streaming=streaming, end_id=end_id, output_config=EVERYTHING)
    queue = ChunkQueue(lambda: None)
    params = SamplingParams(end_id=-1 if end_id is None else end_id)
    result = GenerationResult(1, GenerationRequest([1, 2], params, streaming), queue, NoServer())
    translated = OpenRequest(request, 1, 0.0, RowWidths(VOCABULARY, HIDDEN_SIZE))
    queue.end(Ending(), chunks)
    num_ready = translated.num_ready(result)
    found = [each.result for response in result.read() for each in translated.read(result, response, 32)]
    assert len(found) == num_ready
    return found


@pytest.mark.parametrize("end_id", [None, -1, 7])
@pytest.mark.parametrize("streaming", [False, True])
def test_the_last_token_of_an_output_that_its_guide_ended_is_returned(streaming, end_id) -> None:
    results = responses(received([3, 4, 5], finish_reason=client.FinishReason.EOS), streaming=streaming, end_id=end_id)
    assert [token for result in results for token in result.output_token_ids[0]] == [3, 4, 5]
    assert results[-1].finish_reasons == [Finish.END_ID]
    assert results[-1].log_probs == [[-3.0, -4.0, -5.0]]
    logits = np.concatenate([result.generation_logits.reshape(-1, VOCABULARY) for result in results])
    assert logits[:, 0].tolist() == [3, 4, 5]


@pytest.mark.parametrize("streaming", [False, True])
def test_an_end_id_is_not_returned_nor_are_its_rows(streaming) -> None:
    end = {"finish_reason": client.FinishReason.STOP_TOKEN, "stop_token_id": 7}
    results = responses(received([3, 4, 7], **end), streaming=streaming, end_id=7)
    assert [token for result in results for token in result.output_token_ids[0]] == [3, 4]
    assert results[-1].finish_reasons == [Finish.END_ID]
    assert results[-1].log_probs == [[-3.0, -4.0]]
    assert sum(result.generation_logits.numel() for result in results) == 2 * VOCABULARY


@pytest.mark.parametrize("ids", [[], [7]])
def test_tensors_without_rows_keep_their_dimensions(ids) -> None:
    end = {"finish_reason": client.FinishReason.STOP_TOKEN, "stop_token_id": 7}
    for streaming, shape in ((True, (0, 1, VOCABULARY)), (False, (1, 0, VOCABULARY))):
        (result,) = responses(received(ids, **end), streaming=streaming, end_id=7)
        assert result.output_token_ids == [[]]
        assert tuple(result.generation_logits.shape) == shape
        (hidden,) = result.additional_outputs
        assert tuple(hidden.output.shape) == (1, 0, HIDDEN_SIZE)
