"""Joins the chunks of a stream into a complete result."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from sluice.client.results import Chunk, FinishReason, Generation, Output, Tensor, Timings, TokenLogprob, Usage


@dataclass(slots=True)
class OutputParts:
    """The parts of one output."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    end: Chunk | None = None

    def add(self, chunk: Chunk) -> None:
        self.texts.append(chunk.text)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.finish_reason is not None:
            self.end = chunk

    def output(self, index: int, seed: int | None) -> Output:
        end = self.end or Chunk(index)
        return Output(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=end.finish_reason or FinishReason.UNKNOWN,
            stop_string=end.stop_string,
            stop_token_id=end.stop_token_id,
            # Only the first output has the request's seed; the server derives the seeds of the others.
            seed=None if index else seed,
            cumulative_logprob=end.cumulative_logprob,
        )


class Collected:
    """The chunks of a stream so far."""

    def __init__(self) -> None:
        self._outputs: dict[int, OutputParts] = {}
        self._tensors: list[Tensor] = []

    def add(self, chunk: Chunk) -> None:
        if chunk.tensor is not None:
            self._tensors.append(chunk.tensor)
        else:
            self._outputs.setdefault(chunk.index, OutputParts()).add(chunk)

    def generation(
        self,
        request_id: str,
        seed: int | None,
        usage: Usage,
        timings: Timings | None,
        prompt_logprobs: tuple[TokenLogprob, ...],
        prompt_tail: str,
    ) -> Generation:
        outputs = tuple(parts.output(index, seed) for index, parts in sorted(self._outputs.items()))
        tensors = tuple(join_tensors(self._tensors))
        return Generation(request_id, outputs, usage, timings, prompt_logprobs, tensors, prompt_tail)


def join_tensors(parts: Iterable[Tensor]) -> Iterable[Tensor]:
    """Join the consecutive parts of each tensor."""
    parts_of_tensor: dict[tuple[int, str, bool], list[Tensor]] = {}
    for part in parts:
        parts_of_tensor.setdefault((part.index, part.name, part.context), []).append(part)
    for first, *others in parts_of_tensor.values():
        rows = first.shape[0] + sum(part.shape[0] for part in others)
        data = b"".join([first.data, *(part.data for part in others)])
        yield replace(first, shape=(rows, *first.shape[1:]), data=data)
