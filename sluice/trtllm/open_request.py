"""A request from its start to its end: what the executor received, as TensorRT-LLM's responses."""

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from sluice import executor
from sluice.client import AdapterMissing, AdapterNotFound
from sluice.executor import GenerationResult
from sluice.trtllm.enums import FinishReason
from sluice.trtllm.lora_tasks import not_cached
from sluice.trtllm.metrics import RequestPerfMetrics
from sluice.trtllm.read_metrics import read_metrics
from sluice.trtllm.read_statistics import tokens_per_step
from sluice.trtllm.request import Request
from sluice.trtllm.result import Response, Result
from sluice.trtllm.tensors import WantedTensors

REASONS = {
    "length": FinishReason.LENGTH,
    "timeout": FinishReason.TIMED_OUT,
    "cancelled": FinishReason.CANCELLED,
}


class Token(NamedTuple):
    id: int
    log_prob: float | None


@dataclass(slots=True)
class Output:
    tokens: list[Token] = field(default_factory=list)
    """Returned."""
    held: list[Token] = field(default_factory=list)
    """Received and not returned: one that may be the last, and those whose tensors have not come."""


class OpenRequest:
    """In a stream each response has one token. An output that ended by `end_id` ends before that token.

    The server may say that an output has ended just after its last token. So that this token's response is the final
    one, a token that may be the last is held back until more arrives; others until their tensors have.
    """

    def __init__(self, request: Request, num_outputs: int, arrival: float) -> None:
        """`arrival`: Unix time."""
        searches = request.sampling_config.beam_width > 1
        self._streaming = request.streaming and not searches
        self._whole = request.return_all_generated_tokens
        self._log_probs = request.output_config.return_log_probs
        with_prompt = not request.streaming and not request.output_config.exclude_input_from_output
        self._arrival = arrival
        self._perf_metrics = request.output_config.return_perf_metrics
        self._prompt = list(request.input_token_ids) if with_prompt else []
        self._max_tokens = request.max_tokens
        self._last_ids = {request.end_id, *(ids[-1] for ids in request.stop_words or ())}
        self._task_id = None if request.lora_config is None else request.lora_config.task_id
        self._tensors = WantedTensors(request.output_config, len(request.input_token_ids))
        self._outputs = [Output() for _ in range(num_outputs)]
        self._beams: list[Result] | None = [] if searches else None
        """Of a beam search, which is one result: the outputs that have ended."""
        self._lock = threading.Lock()

    def num_ready(self, result: GenerationResult) -> int:
        """Responses that could be read without waiting."""
        unread = result.unread()
        received: dict[int, list[int]] = {chunk.index: [] for chunk in unread.chunks}
        for chunk in unread.chunks:
            received[chunk.index] += chunk.token_ids
        ended = {chunk.index for chunk in unread.chunks if chunk.finish_reason is not None}
        failed = unread.ending is not None and unread.ending.error is not None
        if self._beams is not None:
            with self._lock:
                return failed or len(ended) + len(self._beams) == len(self._outputs)
        if not self._streaming:
            return len(received) + failed
        with self._lock:
            return failed + sum(
                self._num_ready(
                    index, ids, index in ended, self._tensors.num_tokens(result.outputs, index, unread.chunks)
                )
                for index, ids in received.items()
            )

    def _num_ready(self, index: int, received: list[int], ended: bool, most: int) -> int:
        """`most`: tokens of the output that may be returned."""
        output = self._outputs[index]
        ids = [*(token.id for token in output.held), *received]
        if ended:
            return max(1, len(ids))
        ready = len(ids) - self._may_end(len(output.tokens) + len(ids), ids[-1:])
        return min(ready, max(0, most - len(output.tokens)))

    def read(self, result: GenerationResult, response: executor.Response, tokens_per_block: int) -> list[Response]:
        if response.error is not None:
            return [Response(response.request_id, self._message(response.error.error), response.client_id)]
        assert response.result is not None  # noqa: S101  # it has one or the other
        with self._lock:
            results = self._results(result, response.result, _reason(result, response.result))
            if self._beams is not None:
                results = self._joined(self._beams, results)
            if self._perf_metrics and result.stats is not None:
                for each in results:
                    each.request_perf_metrics = self._metrics(result.stats, each, tokens_per_block)
                    each.avg_decoded_tokens_per_iter = tokens_per_step(result.stats)
        return [Response(response.request_id, each, response.client_id) for each in results]

    def _message(self, error: Exception) -> str:
        if self._task_id is not None and isinstance(error, AdapterNotFound | AdapterMissing):
            return not_cached(self._task_id)
        return str(error)

    def _results(self, result: GenerationResult, received: executor.Result, reason: FinishReason) -> list[Result]:
        output = self._outputs[received.sequence_index]
        tokens = output.held + _tokens(received)
        output.held = []
        parts = [[token] for token in tokens] if self._streaming else [tokens]
        if reason is FinishReason.END_ID and tokens:
            parts[-1] = parts[-1][:-1]
        elif not received.is_sequence_final and self._streaming:
            ready = len(tokens) - self._may_end(len(output.tokens) + len(tokens), [token.id for token in tokens[-1:]])
            complete = self._tensors.num_tokens(result.outputs, received.sequence_index) - len(output.tokens)
            ready = min(ready, max(0, complete))
            parts, output.held = parts[:ready], tokens[ready:]
        elif not parts:
            parts = [[]]
        results = [self._result(received.sequence_index, part, result) for part in parts]
        if results and received.is_sequence_final:
            results[-1].finish_reasons = [reason]
            results[-1].is_sequence_final = True
            results[-1].is_final = received.is_final
        return results

    def _joined(self, beams: list[Result], results: list[Result]) -> list[Result]:
        """One result, once all beams have ended."""
        beams += [result for result in results if result.is_sequence_final]
        if len(beams) < len(self._outputs):
            return []
        beams.sort(key=lambda result: result.sequence_index)
        outputs = [output.tokens for output in self._outputs]
        joined = Result(
            is_final=True,
            output_token_ids=[self._prompt + [token.id for token in tokens] for tokens in outputs],
            finish_reasons=[reason for beam in beams for reason in beam.finish_reasons],
            is_sequence_final=True,
            decoding_iter=max(map(len, outputs)),
        )
        if self._log_probs:
            joined.log_probs = [[token.log_prob or 0.0 for token in tokens] for tokens in outputs]
            joined.cum_log_probs = list(map(sum, joined.log_probs))
        return [joined]

    def _metrics(self, stats: executor.RequestStats, result: Result, tokens_per_block: int) -> RequestPerfMetrics:
        num_tokens = result.decoding_iter if len(self._outputs) == 1 else None
        return read_metrics(stats, self._arrival, tokens_per_block, num_tokens, is_final=result.is_final)

    def _may_end(self, num_tokens: int, last: list[int]) -> bool:
        """`num_tokens`: of the output, with `last`, which is empty or its last token."""
        return bool(last) and (num_tokens >= self._max_tokens or last[0] in self._last_ids)

    def _result(self, index: int, part: list[Token], source: GenerationResult) -> Result:
        output = self._outputs[index]
        start = 0 if self._whole else len(output.tokens)
        output.tokens += part
        log_probs = [token.log_prob or 0.0 for token in output.tokens]
        found = Result(
            output_token_ids=[self._prompt + [token.id for token in (output.tokens if self._whole else part)]],
            cum_log_probs=[sum(log_probs)] if self._log_probs else None,
            log_probs=[log_probs] if self._log_probs else None,
            finish_reasons=[FinishReason.NOT_FINISHED],
            sequence_index=index,
            decoding_iter=len(output.tokens),
        )
        self._tensors.fill(found, source.outputs, start, len(output.tokens), streaming=self._streaming)
        return found


def _tokens(received: executor.Result) -> list[Token]:
    ids, log_probs = received.output_token_ids[0], received.log_probs[0]
    return [Token(each, log_probs[i][each].logprob if log_probs else None) for i, each in enumerate(ids)]


def _reason(result: GenerationResult, received: executor.Result) -> FinishReason:
    reason = received.finish_reasons[0]
    if reason is None:
        return FinishReason.NOT_FINISHED
    if reason == "stop":
        stopped = result.outputs[received.sequence_index].stop_reason
        return FinishReason.END_ID if stopped is None else FinishReason.STOP_WORDS
    return REASONS[reason]
