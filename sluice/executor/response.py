"""Responses in the form of TensorRT-LLM's executor, and the outputs that accumulate them."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from sluice.client import Chunk, Tensor, TokenLogprob
from sluice.client import FinishReason as ClientReason
from sluice.executor.errors import RequestError

CONTEXT_LOGITS, GENERATION_LOGITS = "context_logits", "generation_logits"
"""Names of the tensors with logits."""
FinishReason = Literal["stop", "length", "timeout", "cancelled", "unknown"]
"""TensorRT-LLM's names. "timeout": the request's allotted time expired; "unknown": a reason that only newer servers
have."""

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
    """Log-probability of one token at one position."""

    logprob: float | None
    """Natural logarithm of the probability; None for the first token of a prompt."""
    rank: int
    """Rank of the token at its position; 1 is the most likely token."""


TokenLogprobs = dict[int, Logprob]
"""Log-probabilities at one position by token id: the position's token, then the requested number of most likely
tokens."""


def read_logprobs(entries: Iterable[TokenLogprob]) -> list[TokenLogprobs]:
    """One dict per position."""
    return [{token.token_id: Logprob(token.logprob, token.rank) for token in (entry, *entry.top)} for entry in entries]


@dataclass(frozen=True, slots=True)
class Result:
    """New tokens of one output. The lists have one entry, since each returned beam is a separate output."""

    sequence_index: int
    """Index of the output among the request's n outputs."""
    output_token_ids: list[list[int]]
    """New token ids; with `return_all_generated_tokens`, all token ids so far."""
    text: str
    """Text of these tokens."""
    log_probs: list[list[TokenLogprobs]]
    """Log-probabilities of these tokens, if requested."""
    cum_log_probs: list[float | None]
    """Sum of the log-probabilities of all tokens so far, if requested."""
    finish_reasons: list[FinishReason | None]
    """None: the output has not ended."""
    is_sequence_final: bool
    """Whether this is the last result of the output."""
    is_final: bool
    """Whether this is the last result of the request."""


@dataclass(frozen=True, slots=True)
class Response:
    """A result or an error of one request."""

    request_id: int
    client_id: int | None
    result: Result | None = None
    error: RequestError | None = None

    def has_error(self) -> bool:
        """Whether the request failed. An error is the last response of its request."""
        return self.error is not None

    @property
    def error_msg(self) -> str:
        """The error's message; empty without an error."""
        return str(self.error or "")


@dataclass(slots=True)
class CompletionOutput:
    """One output as read so far. The fields ending in `_diff` hold what the latest read added."""

    index: int
    """Index among the request's n outputs."""
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per token, if requested."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of all tokens so far, if requested."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """One entry per prompt token, if requested; set at the end."""
    finish_reason: FinishReason | None = None
    """Why the output ended; None: it has not."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the output; None if something else did, such as EOS or `end_id`."""
    tensors: list[Tensor] = field(default_factory=list)
    """Parts of the requested tensors, in order of their rows."""
    text_diff: str = ""
    token_ids_diff: list[int] = field(default_factory=list)
    logprobs_diff: list[TokenLogprobs] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Number of tokens so far."""
        return len(self.token_ids)

    @property
    def generation_logits(self) -> Any:
        """Logits of the output as read so far, a numpy array [tokens, vocabulary]; None if none were read.

        Requested with `SamplingParams.return_generation_logits`.
        """
        return self.tensor(GENERATION_LOGITS)

    def tensor(self, name: str, *, context: bool = False) -> Any:
        """The rows read so far of a requested tensor, as a numpy array; None if no rows were read.

        `context`: the rows of the prompt, which output 0 carries, in place of those of the output.
        """
        parts = [part.array() for part in self.tensors if (part.name, part.context) == (name, context)]
        if not parts:
            return None
        # Imported here, because this module is also used without numpy.
        import numpy as np

        return np.concatenate(parts)

    def begin_read(self) -> None:
        """Clear the `_diff` fields."""
        self.text_diff, self.token_ids_diff, self.logprobs_diff = "", [], []

    def add(self, chunk: Chunk, end_id: int | None = None) -> None:
        """Append a chunk of the stream. `end_id` replaces the model's EOS, so it does not count as `stop_reason`."""
        logprobs = read_logprobs(chunk.logprobs)
        self.text_diff += chunk.text
        self.token_ids_diff += chunk.token_ids
        self.logprobs_diff += logprobs
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        self.logprobs += logprobs
        if chunk.tensor is not None:
            self.tensors.append(chunk.tensor)
        # The server sends the sum only at the end, but each response of a stream has the sum so far.
        for entry in chunk.logprobs:
            self.cumulative_logprob = (self.cumulative_logprob or 0.0) + (entry.logprob or 0.0)
        if chunk.finish_reason is not None:
            self.finish_reason = REASONS[chunk.finish_reason]
            stop_id = None if chunk.stop_token_id == end_id else chunk.stop_token_id
            self.stop_reason = chunk.stop_string if stop_id is None else stop_id
            if chunk.cumulative_logprob is not None:
                self.cumulative_logprob = chunk.cumulative_logprob

    def end(self, reason: FinishReason) -> bool:
        """Set the finish reason, unless the output has ended already. Returns whether it was set."""
        if self.finish_reason is not None:
            return False
        self.finish_reason = reason
        return True

    def result(self, whole: bool, is_final: bool) -> Result:
        """What the latest read added or, with `whole`, everything so far."""
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
