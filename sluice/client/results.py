"""Results as immutable values, read from the protobuf messages.

Objects that are created for each token are msgspec Structs, which are about twenty times as fast to create as frozen
dataclasses.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgspec
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health_pb2

from sluice.v1 import generation_pb2 as pb


class FinishReason(StrEnum):
    """Why an output ended: the values of sluice.v1.FinishReason, in lower case."""

    EOS = "eos"
    STOP_STRING = "stop_string"
    STOP_TOKEN = "stop_token"  # noqa: S105
    LENGTH = "length"
    ABORTED = "aborted"
    TIME_LIMIT = "time_limit"
    UNKNOWN = "unknown"
    """No reason, or one that only newer servers have."""


class TokenLogprob(msgspec.Struct, frozen=True):
    """Log-probability of one token at one position."""

    token_id: int
    token: bytes
    """The token's bytes, which need not be valid UTF-8."""
    logprob: float | None
    """Natural logarithm of the probability; None for the first token of a prompt."""
    rank: int
    """Rank of the token at its position; 1 is the most likely token."""
    top: tuple["TokenLogprob", ...]
    """The most likely tokens at the position, most likely first, as many as requested."""
    omitted: bool = False
    """Whether it is a special token that the text omits. Always False in `top`."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts over all outputs of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    """Prompt tokens found in the prefix cache."""
    accepted_draft_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations of the phases of a request, in seconds. Requested with `timings=True`."""

    queue: float
    prefill: float
    decode: float
    time_to_first_token: float


@dataclass(frozen=True, slots=True)
class Tensor:
    """Consecutive rows of a requested tensor; see sluice.v1.TensorChunk."""

    index: int
    """Index of the output."""
    name: str
    start: int
    """Number of the first row."""
    context: bool
    """Whether the rows belong to the prompt's positions, not to the output's."""
    shape: tuple[int, ...]
    """[rows, ...]"""
    dtype: str
    data: bytes
    """The values, row-major and little-endian."""

    def array(self) -> Any:
        """The rows as a read-only numpy array; bfloat16 becomes float32. Requires numpy."""
        import numpy as np

        if self.dtype == "bfloat16":
            widened = np.frombuffer(self.data, "<u2").astype("<u4") << 16
            return widened.view("<f4").reshape(self.shape)
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Output:
    """One output of a `Generation`."""

    index: int
    """Index among the request's outputs."""
    text: str
    token_ids: tuple[int, ...]
    """Empty unless requested with `token_ids=True`."""
    logprobs: tuple[TokenLogprob, ...]
    """One entry per token, if requested."""
    finish_reason: FinishReason
    stop_string: str | None
    """The stop string that ended the output, if one did."""
    stop_token_id: int | None
    """The stop token that ended the output, if one did."""
    seed: int | None
    """The seed of the output's sampling; None if unknown."""
    cumulative_logprob: float | None
    """Sum of the log-probabilities of the tokens, if requested."""


@dataclass(frozen=True, slots=True)
class Generation:
    """The complete result of a request."""

    request_id: str
    outputs: tuple[Output, ...]
    usage: Usage
    timings: Timings | None
    """None unless requested with `timings=True`."""
    prompt_logprobs: tuple[TokenLogprob, ...]
    """One entry per prompt token, if requested."""
    tensors: tuple[Tensor, ...]
    """The requested tensors, each complete."""
    prompt_tail: str = ""
    """The end of the prompt, if requested."""

    @property
    def text(self) -> str:
        """Text of the first output."""
        return self.outputs[0].text

    @property
    def finish_reason(self) -> FinishReason:
        """Why the first output ended."""
        return self.outputs[0].finish_reason


class Chunk(msgspec.Struct, frozen=True):
    """A part of one output in a stream: new text, a tensor, or the output's end, which has a `finish_reason`."""

    index: int
    """Index of the output."""
    text: str = ""
    """New text."""
    token_ids: tuple[int, ...] = ()
    """New token ids; empty unless requested with `token_ids=True`."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per new token, if requested."""
    token_offset: int = 0
    """Position of the first new token in the output."""
    token_count: int = 0
    """Number of new tokens, whether or not their ids were requested."""
    finish_reason: FinishReason | None = None
    """Why the output ended; None: it has not."""
    stop_string: str | None = None
    """The stop string that ended the output, if one did."""
    stop_token_id: int | None = None
    """The stop token that ended the output, if one did."""
    completion_tokens: int | None = None
    """Number of the output's tokens; only with `finish_reason`."""
    cumulative_logprob: float | None = None
    """Sum of the log-probabilities of the output's tokens, if requested; only with `finish_reason`."""
    tensor: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Tokenization:
    """The tokens of a text or a chat."""

    token_ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]
    """Position [start, end) of each token in the text, in Unicode code points; empty unless requested."""


def seconds(message: Duration | Timestamp) -> float:
    """A duration in seconds, or a time in seconds since 1970."""
    return message.seconds + message.nanos / 1e9


def read_generation(response: pb.GenerateResponse) -> Generation:
    return Generation(
        request_id=response.request_id,
        outputs=tuple(_read_output(output) for output in response.outputs),
        usage=read_usage(response.usage),
        timings=read_timings(response.timings) if response.HasField("timings") else None,
        prompt_logprobs=read_logprobs(response.prompt_logprobs),
        tensors=tuple(read_tensor(tensor) for tensor in response.tensors),
        prompt_tail=response.prompt_tail,
    )


def read_tokenization(response: pb.TokenizeResponse) -> Tokenization:
    return Tokenization(tuple(response.token_ids), tuple((offset.start, offset.end) for offset in response.offsets))


def is_serving(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


def read_delta(delta: pb.Delta) -> Chunk:
    return Chunk(
        index=delta.index,
        text=delta.text,
        token_ids=tuple(delta.token_ids),
        logprobs=read_logprobs(delta.logprobs),
        token_offset=delta.token_offset,
        token_count=delta.token_count,
    )


def read_finished(finished: pb.Finished) -> Chunk:
    return Chunk(
        index=finished.index,
        token_offset=finished.completion_tokens,
        finish_reason=_read_reason(finished.finish_reason),
        stop_string=finished.stop_string if finished.HasField("stop_string") else None,
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        completion_tokens=finished.completion_tokens,
        cumulative_logprob=finished.cumulative_logprob if finished.HasField("cumulative_logprob") else None,
    )


def read_usage(usage: pb.Usage) -> Usage:
    return Usage(usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens, usage.accepted_draft_tokens)


def read_timings(timings: pb.Timings) -> Timings:
    return Timings(
        seconds(timings.queue), seconds(timings.prefill), seconds(timings.decode), seconds(timings.time_to_first_token)
    )


def read_tensor(tensor: pb.TensorChunk) -> Tensor:
    return Tensor(
        index=tensor.index,
        name=tensor.name,
        start=tensor.start,
        context=tensor.context,
        shape=tuple(tensor.shape),
        dtype=tensor.dtype,
        data=tensor.data,
    )


def read_logprobs(entries: Iterable[pb.TokenLogprob]) -> tuple[TokenLogprob, ...]:
    return tuple(
        TokenLogprob(
            token_id=entry.token_id,
            token=entry.token,
            logprob=entry.logprob if entry.HasField("logprob") else None,
            rank=entry.rank,
            top=read_logprobs(entry.top),
            omitted=entry.omitted,
        )
        for entry in entries
    )


def _read_output(output: pb.Output) -> Output:
    return Output(
        index=output.index,
        text=output.text,
        token_ids=tuple(output.token_ids),
        logprobs=read_logprobs(output.logprobs),
        finish_reason=_read_reason(output.finish_reason),
        stop_string=output.stop_string if output.HasField("stop_string") else None,
        stop_token_id=output.stop_token_id if output.HasField("stop_token_id") else None,
        seed=output.seed if output.HasField("seed") else None,
        cumulative_logprob=output.cumulative_logprob if output.HasField("cumulative_logprob") else None,
    )


def _read_reason(number: int) -> FinishReason:
    known = pb.FinishReason.DESCRIPTOR.values_by_number.get(number)
    if known is None or number == pb.FINISH_REASON_UNSPECIFIED:
        return FinishReason.UNKNOWN
    return FinishReason(known.name.removeprefix("FINISH_REASON_").lower())
