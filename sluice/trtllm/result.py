"""Responses to requests, and their results."""

from dataclasses import dataclass, field
from typing import Any

from sluice.trtllm.enums import FinishReason
from sluice.trtllm.options import UnsupportedOptionError
from sluice.trtllm.request import ContextPhaseParams
from sluice.trtllm.speculation import SpeculativeDecodingFastLogitsInfo
from sluice.trtllm.statistics import RequestPerfMetrics


@dataclass(eq=False)
class AdditionalOutput:
    """A tensor that `OutputConfig.additional_model_outputs` requested."""

    name: str
    output: Any


@dataclass(eq=False)
class Result:
    """New tokens of one output. The lists have one entry per beam."""

    is_final: bool = False
    """Whether this is the last result of the request."""
    output_token_ids: list[list[int]] = field(default_factory=list)
    """New token ids; without streaming, they follow those of the prompt unless `exclude_input_from_output` is set."""
    cum_log_probs: list[float] | None = None
    """Sum of the log-probabilities of all tokens so far."""
    log_probs: list[list[float]] | None = None
    """Log-probabilities of all tokens so far."""
    context_logits: Any = None
    """Tensor [prompt tokens, vocabulary]."""
    generation_logits: Any = None
    """Tensor [1, tokens, vocabulary]; in a stream [tokens, 1, vocabulary]."""
    spec_dec_fast_logits_info: SpeculativeDecodingFastLogitsInfo | None = None
    encoder_output: Any = None
    finish_reasons: list[FinishReason] = field(default_factory=list)
    sequence_index: int = 0
    """Index of the output among the returned sequences."""
    is_sequence_final: bool = False
    """Whether this is the last result of the output."""
    decoding_iter: int = 0
    """Number of tokens so far."""
    avg_decoded_tokens_per_iter: float | None = None
    """Mean tokens per step, above 1 if draft tokens were accepted; None without `request_perf_metrics`."""
    context_phase_params: ContextPhaseParams | None = None
    request_perf_metrics: RequestPerfMetrics | None = None
    additional_outputs: list[AdditionalOutput] = field(default_factory=list)


def deserialize_result(data: bytes) -> Result:  # noqa: ARG001
    """Not supported: raises UnsupportedOptionError."""
    raise UnsupportedOptionError("deserialize_result", "results have no binary format, but can be pickled")


class Response:
    """A result or an error: `Response(request_id, result)`, `Response(request_id, error_msg)`."""

    def __init__(
        self,
        request_id: int,
        outcome: Result | str | None = None,
        client_id: int | None = None,
        *,
        result: Result | None = None,
        error_msg: str | None = None,
    ) -> None:
        outcomes = [value for value in (outcome, result, error_msg) if value is not None]
        if len(outcomes) != 1:
            raise TypeError("a Response needs either a result or an error_msg")
        self.request_id = request_id
        self.client_id = client_id
        self._outcome = outcomes[0]

    def has_error(self) -> bool:
        """Whether the request failed."""
        return isinstance(self._outcome, str)

    @property
    def error_msg(self) -> str:
        """Why the request failed. Raises RuntimeError if it did not."""
        if isinstance(self._outcome, str):
            return self._outcome
        raise RuntimeError(f"the response of request {self.request_id} has no error")

    @property
    def result(self) -> Result:
        """The result. Raises RuntimeError if the request failed."""
        if isinstance(self._outcome, Result):
            return self._outcome
        raise RuntimeError(f"request {self.request_id} failed and has no result: {self._outcome}")

    def clear_context_logits(self) -> None:
        if not self.has_error():
            self.result.context_logits = None

    def clear_generation_logits(self) -> None:
        if not self.has_error():
            self.result.generation_logits = None

    def __repr__(self) -> str:
        return f"Response(request_id={self.request_id}, client_id={self.client_id}, {self._outcome!r})"
