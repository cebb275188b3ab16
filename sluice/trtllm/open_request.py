"""A request from its start to its end: what the executor received, as TensorRT-LLM's responses."""

import threading
from dataclasses import dataclass, field

from sluice import executor
from sluice.executor import GenerationResult
from sluice.executor.chunk_queue import Unread
from sluice.trtllm.enums import FinishReason
from sluice.trtllm.request import Request
from sluice.trtllm.result import Response, Result

REASONS = {
    "length": FinishReason.LENGTH,
    "timeout": FinishReason.TIMED_OUT,
    "cancelled": FinishReason.CANCELLED,
}


@dataclass(slots=True)
class Output:
    """What was returned of one output."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)


class OpenRequest:
    """In a stream each response has one token. An output that ended by `end_id` ends before that token."""

    def __init__(self, request: Request, num_outputs: int) -> None:
        self._streaming = request.streaming
        self._whole = request.return_all_generated_tokens
        self._log_probs = request.output_config.return_log_probs
        with_prompt = not request.streaming and not request.output_config.exclude_input_from_output
        self._prompt = list(request.input_token_ids) if with_prompt else []
        self._outputs = [Output() for _ in range(num_outputs)]
        self._lock = threading.Lock()

    def num_ready(self, unread: Unread) -> int:
        """Responses that could be read without waiting."""
        tokens: dict[int, int] = {}
        for chunk in unread.chunks:
            ended = chunk.finish_reason is not None
            tokens[chunk.index] = max(tokens.get(chunk.index, 0) + len(chunk.token_ids), int(ended))
        failed = unread.ending is not None and unread.ending.error is not None
        return (sum(tokens.values()) if self._streaming else len(tokens)) + failed

    def read(self, result: GenerationResult, response: executor.Response) -> list[Response]:
        if response.error is not None:
            return [Response(response.request_id, str(response.error.error), response.client_id)]
        assert response.result is not None  # noqa: S101  # it has one or the other
        with self._lock:
            results = self._results(response.result, _reason(result, response.result))
        return [Response(response.request_id, each, response.client_id) for each in results]

    def _results(self, received: executor.Result, reason: FinishReason) -> list[Result]:
        index = received.sequence_index
        output = self._outputs[index]
        tokens = list(received.output_token_ids[0])
        log_probs = [entry[token].logprob or 0.0 for entry, token in zip(received.log_probs[0], tokens, strict=False)]
        if reason is FinishReason.END_ID and tokens:
            tokens, log_probs = tokens[:-1], log_probs[: len(tokens) - 1]
            ends_apart = True
        else:
            ends_apart = not tokens
        parts = [[token] for token in tokens] if self._streaming else [tokens]
        if self._streaming and ends_apart and received.is_sequence_final:
            parts.append([])
        results = []
        for position, part in enumerate(parts):
            output.tokens += part
            start = position if self._streaming else 0
            output.log_probs += log_probs[start : start + len(part)]
            is_last = position == len(parts) - 1
            results.append(self._result(index, part, reason if is_last else FinishReason.NOT_FINISHED))
        if results:
            results[-1].is_sequence_final = received.is_sequence_final
            results[-1].is_final = received.is_final
        return results

    def _result(self, index: int, part: list[int], reason: FinishReason) -> Result:
        output = self._outputs[index]
        return Result(
            output_token_ids=[self._prompt + (list(output.tokens) if self._whole else part)],
            cum_log_probs=[sum(output.log_probs)] if self._log_probs else None,
            log_probs=[list(output.log_probs)] if self._log_probs else None,
            finish_reasons=[reason],
            sequence_index=index,
            decoding_iter=len(output.tokens),
        )


def _reason(result: GenerationResult, received: executor.Result) -> FinishReason:
    reason = received.finish_reasons[0]
    if reason is None:
        return FinishReason.NOT_FINISHED
    if reason == "stop":
        stopped = result.outputs[received.sequence_index].stop_reason
        return FinishReason.END_ID if stopped is None else FinishReason.STOP_WORDS
    return REASONS[reason]
