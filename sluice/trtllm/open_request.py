"""One request from its start to its end: translates the executor's responses, and their tensors, to TensorRT-LLM's."""

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from sluice import executor
from sluice.client import AdapterMissing, AdapterNotFound, Chunk, Tensor
from sluice.executor import CompletionOutput, GenerationResult
from sluice.executor.response import CONTEXT_LOGITS, GENERATION_LOGITS
from sluice.executor.stats import ReportedRequest
from sluice.trtllm.enums import FinishReason
from sluice.trtllm.lora import not_cached
from sluice.trtllm.request import OutputConfig, Request
from sluice.trtllm.result import AdditionalOutput, Response, Result
from sluice.trtllm.statistics import RequestPerfMetrics, read_metrics, tokens_per_step

if TYPE_CHECKING:
    import torch

REASONS = {
    "length": FinishReason.LENGTH,
    "timeout": FinishReason.TIMED_OUT,
    "cancelled": FinishReason.CANCELLED,
}
ALL = 1 << 62
"""A number of rows that no output reaches."""


class RowWidths(NamedTuple):
    """Number of values in a row of a model's tensors, for the shapes of tensors without rows."""

    logits: int
    hidden: int

    @staticmethod
    def of(model: Mapping[str, Any]) -> "RowWidths":
        """`model` is the model's config.json."""
        return RowWidths(int(model["vocab_size"]), int(model.get("hidden_size") or model.get("n_embd") or 0))

    def width(self, name: str) -> int:
        return self.logits if name in (CONTEXT_LOGITS, GENERATION_LOGITS) else self.hidden


class WantedTensors:
    """The tensors that one request returns."""

    def __init__(self, config: OutputConfig, num_prompt: int, widths: RowWidths) -> None:
        """`num_prompt`: number of prompt tokens."""
        others = config.additional_model_outputs or []
        self._context_logits = config.return_context_logits
        self._generation_logits = config.return_generation_logits
        self._others = [each.name for each in others]
        self._context_others = [each.name for each in others if each.gather_context]
        self._num_prompt = num_prompt
        self._widths = widths

    def num_tokens(self, outputs: Sequence[CompletionOutput], index: int, unread: Iterable[Chunk] = ()) -> int:
        """Number of tokens of an output whose tensor rows, and those of the prompt, have all been received."""
        names = [*self._others, *[GENERATION_LOGITS] * self._generation_logits]
        context = [*self._context_others, *[CONTEXT_LOGITS] * self._context_logits]
        if not (names or context):
            return ALL
        new = [chunk.tensor for chunk in unread if chunk.tensor is not None]
        first, this = ([*outputs[i].tensors, *(tensor for tensor in new if tensor.index == i)] for i in (0, index))
        if any(_rows(first, name, context=True) < self._num_prompt for name in context):
            return 0
        return min((_rows(this, name) for name in names), default=ALL)

    def fill(
        self, result: Result, outputs: Sequence[CompletionOutput], start: int, end: int, *, streaming: bool
    ) -> None:
        """Set the tensors of `result`, which has the tokens [start, end) of its output."""
        first, this = outputs[0].tensors, outputs[result.sequence_index].tensors
        if self._context_logits:
            result.context_logits = self._between(first, CONTEXT_LOGITS, 0, ALL, context=True)
        if self._generation_logits:
            logits = self._between(this, GENERATION_LOGITS, start, end)
            # [tokens, beams, vocabulary] in a stream, else [beams, tokens, vocabulary]. Each beam is a separate output.
            result.generation_logits = logits[:, None] if streaming else logits[None]
        for name in self._context_others:
            rows = self._between(first, name, 0, ALL, context=True)
            result.additional_outputs.append(AdditionalOutput(f"context_{name}", rows))
        for name in self._others:
            result.additional_outputs.append(AdditionalOutput(name, self._between(this, name, start, end)[None]))

    def _between(
        self, tensors: Iterable[Tensor], name: str, start: int, end: int, *, context: bool = False
    ) -> "torch.Tensor":
        """The received rows [start, end) of one tensor: [rows, width], also without rows."""
        import numpy as np
        import torch

        parts = []
        for part in tensors:
            if (part.name, part.context) == (name, context) and part.start < end and part.start + part.shape[0] > start:
                parts.append(part.array()[max(0, start - part.start) : end - part.start])
        if not parts:
            return torch.empty(0, self._widths.width(name))
        # A copy, which the caller may modify.
        return torch.from_numpy(np.concatenate(parts))


def _rows(tensors: Iterable[Tensor], name: str, *, context: bool = False) -> int:
    return sum(tensor.shape[0] for tensor in tensors if (tensor.name, tensor.context) == (name, context))


class Token(NamedTuple):
    id: int
    log_prob: float | None


@dataclass(slots=True)
class Output:
    tokens: list[Token] = field(default_factory=list)
    """Tokens that were returned."""
    held: list[Token] = field(default_factory=list)
    """Tokens that were received but are held back: a possible last token, and those whose tensors are missing."""


class OpenRequest:
    """Translates the responses of one request.

    In a stream, each response has one token. An output that ends by `end_id` does not include that token. The response
    of an output's last token is its final response; but the server may report the end of an output after its last
    token. So a token that may be the last is held back until more is received, and other tokens until their tensors
    have been received.
    """

    def __init__(self, request: Request, num_outputs: int, arrival: float, widths: RowWidths) -> None:
        """`arrival`: when the request was submitted, in seconds since 1970."""
        uses_beams = request.sampling_config.beam_width > 1
        self._streaming = request.streaming and not uses_beams
        self._returns_all = request.return_all_generated_tokens
        self._log_probs = request.output_config.return_log_probs
        with_prompt = not request.streaming and not request.output_config.exclude_input_from_output
        self._arrival = arrival
        self._perf_metrics = request.output_config.return_perf_metrics
        self._prompt = list(request.input_token_ids) if with_prompt else []
        self._max_tokens = request.max_tokens
        self._end_id = request.end_id
        self._last_ids = {request.end_id, *(ids[-1] for ids in request.stop_words or ())}
        self._task_id = None if request.lora_config is None else request.lora_config.task_id
        self._tensors = WantedTensors(request.output_config, len(request.input_token_ids), widths)
        self._outputs = [Output() for _ in range(num_outputs)]
        self._beams: list[Result] | None = [] if uses_beams else None
        """The ended outputs of a beam search, which are returned as one result; None without beam search."""
        self._lock = threading.Lock()

    def num_ready(self, result: GenerationResult) -> int:
        """Number of responses that could be read without waiting."""
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

    def _num_ready(self, index: int, received: list[int], ended: bool, num_complete: int) -> int:
        """Number of responses of one output. `num_complete`: tokens whose tensors have been received."""
        output = self._outputs[index]
        ids = [*(token.id for token in output.held), *received]
        if ended:
            return max(1, len(ids))
        ready = len(ids) - self._may_end(len(output.tokens) + len(ids), ids[-1:])
        return min(ready, max(0, num_complete - len(output.tokens)))

    def read(self, result: GenerationResult, response: executor.Response, tokens_per_block: int) -> list[Response]:
        """Translate one response that was read from `result`; empty if its tokens are held back."""
        if response.error is not None:
            return [Response(response.request_id, self._message(response.error.error), response.client_id)]
        assert response.result is not None  # noqa: S101  # it has one or the other
        with self._lock:
            results = self._results(result, response.result, _reason(result, response.result))
            if self._beams is not None:
                results = self._join_beams(self._beams, results)
            if self._perf_metrics and result.stats is not None:
                for translated in results:
                    translated.request_perf_metrics = self._metrics(result.stats, translated, tokens_per_block)
                    translated.avg_decoded_tokens_per_iter = tokens_per_step(result.stats)
        return [Response(response.request_id, translated, response.client_id) for translated in results]

    def _message(self, error: Exception) -> str:
        if self._task_id is not None and isinstance(error, AdapterNotFound | AdapterMissing):
            return not_cached(self._task_id)
        return str(error)

    def _results(self, result: GenerationResult, received: executor.Result, reason: FinishReason) -> list[Result]:
        output = self._outputs[received.sequence_index]
        tokens = output.held + _tokens(received)
        output.held = []
        parts = [[token] for token in tokens] if self._streaming else [tokens]
        if reason is FinishReason.END_ID and tokens and tokens[-1].id == self._end_id:
            # A guide also ends outputs so, but after their last token, which belongs to them.
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

    def _join_beams(self, beams: list[Result], results: list[Result]) -> list[Result]:
        """Add the ended outputs to `beams`; once all beams have ended, return one result with all of them."""
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

    def _metrics(self, stats: ReportedRequest, result: Result, tokens_per_block: int) -> RequestPerfMetrics:
        num_tokens = result.decoding_iter if len(self._outputs) == 1 else None
        return read_metrics(stats, self._arrival, tokens_per_block, num_tokens, is_final=result.is_final)

    def _may_end(self, num_tokens: int, last: list[int]) -> bool:
        """Whether an output of `num_tokens` may have ended with the token in `last`, which is empty if it has none."""
        return bool(last) and (num_tokens >= self._max_tokens or last[0] in self._last_ids)

    def _result(self, index: int, part: list[Token], source: GenerationResult) -> Result:
        output = self._outputs[index]
        start = 0 if self._returns_all else len(output.tokens)
        output.tokens += part
        log_probs = [token.log_prob or 0.0 for token in output.tokens]
        result = Result(
            output_token_ids=[self._prompt + [token.id for token in (output.tokens if self._returns_all else part)]],
            cum_log_probs=[sum(log_probs)] if self._log_probs else None,
            log_probs=[log_probs] if self._log_probs else None,
            finish_reasons=[FinishReason.NOT_FINISHED],
            sequence_index=index,
            decoding_iter=len(output.tokens),
        )
        self._tensors.fill(result, source.outputs, start, len(output.tokens), streaming=self._streaming)
        return result


def _tokens(received: executor.Result) -> list[Token]:
    ids, log_probs = received.output_token_ids[0], received.log_probs[0]
    return [Token(token, log_probs[i][token].logprob if log_probs else None) for i, token in enumerate(ids)]


def _reason(result: GenerationResult, received: executor.Result) -> FinishReason:
    reason = received.finish_reasons[0]
    if reason is None:
        return FinishReason.NOT_FINISHED
    if reason == "stop":
        stopped = result.outputs[received.sequence_index].stop_reason
        return FinishReason.END_ID if stopped is None else FinishReason.STOP_WORDS
    return REASONS[reason]
