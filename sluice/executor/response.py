"""Responses in the form of TensorRT-LLM's executor, and the outputs that they add up to."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice.client import Chunk, Tensor, TokenLogprob
from sluice.client import FinishReason as ClientReason
from sluice.executor.errors import RequestError

CONTEXT_LOGITS, GENERATION_LOGITS = "context_logits", "generation_logits"
"""Names of tensors."""
FinishReason = Literal["stop", "length", "timeout", "cancelled", "unknown"]
"""As in TensorRT-LLM. "timeout": the request's allotted time is over; "unknown": a reason of a newer server."""

REASONS: dict[ClientReason, FinishReason] = {
    ClientReason.EOS: "stop",
    ClientReason.STOP_STRING: "stop",
    ClientReason.STOP_TOKEN: "stop",
    ClientReason.LENGTH: "length",
    ClientReason.TIME_LIMIT: "timeout",
    ClientReason.ABORTED: "cancelled",
    ClientReason.UNKNOWN: "unknown",
}


@dataclass(frozen=True, slots=True)
class Logprob:
    logprob: float | None
    """Natural logarithm; None for the first token of a prompt."""
    rank: int
    """1: the most likely token."""


TokenLogprobs = dict[int, Logprob]
"""By token id: first the token itself, then the requested number of most likely tokens."""


def read_logprobs(entries: Iterable[TokenLogprob]) -> list[TokenLogprobs]:
    """One dict per position."""
    return [{each.token_id: Logprob(each.logprob, each.rank) for each in (entry, *entry.top)} for entry in entries]


@dataclass(frozen=True, slots=True)
class Result:
    """New tokens of one output. Lists have one entry: each beam that is returned is an output of its own."""

    sequence_index: int
    """Index among the n outputs."""
    output_token_ids: list[list[int]]
    """New tokens; with return_all_generated_tokens, all so far."""
    text: str
    """Text of these tokens."""
    log_probs: list[list[TokenLogprobs]]
    cum_log_probs: list[float | None]
    """Sum over all tokens so far, if logprobs were requested."""
    finish_reasons: list[FinishReason | None]
    """None: not finished."""
    is_sequence_final: bool
    """The last result of this output."""
    is_final: bool
    """The last result of the request."""


@dataclass(frozen=True, slots=True)
class Response:
    request_id: int
    client_id: int | None
    result: Result | None = None
    error: RequestError | None = None

    def has_error(self) -> bool:
        """Whether the request failed; no other response follows."""
        return self.error is not None

    @property
    def error_msg(self) -> str:
        return str(self.error or "")


@dataclass(slots=True)
class CompletionOutput:
    """One output as read so far. The `_diff` fields hold what the latest read added."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One per token, if requested."""
    cumulative_logprob: float | None = None
    """Sum over all tokens, if logprobs were requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """If requested; set at the end."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None if EOS, `end_id` or anything else did."""
    tensors: list[Tensor] = field(default_factory=list)
    """Parts of the requested tensors, in order."""
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    logprobs_diff: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.token_ids)

    @property
    def generation_logits(self) -> Any:
        """[tokens, vocabulary], if requested: those that have come."""
        return self.tensor(GENERATION_LOGITS)

    def tensor(self, name: str, *, context: bool = False) -> Any:
        """The rows of a requested tensor that have come, as a numpy array; None: no rows. Those of the prompt
        (`context`) are with output 0."""
        parts = [each.array() for each in self.tensors if (each.name, each.context) == (name, context)]
        if not parts:
            return None
        # Here, because clients without numpy use this module too.
        import numpy as np

        return np.concatenate(parts)

    def begin_read(self) -> None:
        self.text_diff, self.token_ids_diff, self.logprobs_diff = "", [], []

    def add(self, chunk: Chunk, end_id: int | None = None) -> None:
        """Append a chunk of the stream. `end_id` replaces the model's EOS, so it is no `stop_reason`."""
        logprobs = read_logprobs(chunk.logprobs)
        self.text_diff += chunk.text
        self.token_ids_diff += chunk.token_ids
        self.logprobs_diff += logprobs
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += logprobs
        if chunk.tensor is not None:
            self.tensors.append(chunk.tensor)
        # The server sends the sum at the end only; a stream's responses have it from the start.
        for entry in chunk.logprobs:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + (entry.logprob or 0.0)
        if chunk.finish_reason is not None:
            self.finish_reason = REASONS[chunk.finish_reason]
            stop_id = None if chunk.stop_token_id == end_id else chunk.stop_token_id
            self.stop_reason = chunk.stop_string if stop_id is None else stop_id
            if chunk.cumulative_logprob is not None:
                self.cumulative_logprob = chunk.cumulative_logprob

    def end(self, reason: FinishReason) -> bool:
        """Returns False if the output has ended already."""
        if self.finish_reason is not None:
            return False
        self.finish_reason = reason
        return True

    def result(self, whole: bool, is_final: bool) -> Result:
        """What the latest read added; with `whole`, everything so far."""
        return Result(
            sequence_index=self.index,
            output_token_ids=[list(self.token_ids if whole else self.token_ids_diff)],
            text=self.text if whole else self.text_diff,
            log_probs=[list(self.logprobs if whole else self.logprobs_diff)],
            cum_log_probs=[self.cumulative_logprob],
            finish_reasons=[self.finish_reason],
            is_sequence_final=self.finish_reason is not None,
            is_final=is_final,
        )
