"""Responses of /v1/completions: complete, and chunk by chunk."""

from collections.abc import Iterator

from msgspec import UNSET

from gateway.answers.ends import end_of
from gateway.answers.logprobs import of_completion, of_prompt
from gateway.answers.objects import CompletionChoice
from gateway.answers.text_offsets import TextOffsets
from gateway.requests.completion import CompletionRequest
from sluice.client import AsyncStream, Chunk, Generation


def whole(generation: Generation, first: int, request: CompletionRequest) -> Iterator[CompletionChoice]:
    """The choices for one prompt. `first`: index of the first of them."""
    prompt = generation.prompt_logprobs if request.echo else ()
    for output in generation.outputs:
        logprobs = None
        if request.logprobs is not None:
            offsets = TextOffsets()
            offsets.add_text(output.text)
            logprobs = of_completion((*prompt, *output.logprobs), request.logprobs, offsets)
        yield CompletionChoice(
            index=first + output.index,
            text=output.text,
            logprobs=logprobs,
            prompt_logprobs=UNSET if request.prompt_logprobs is None else of_prompt(generation.prompt_logprobs),
            **end_of(output),
        )


class CompletionDeltas:
    """Turns the chunks of several streams, one per prompt, into the chunks of one completion."""

    def __init__(self, request: CompletionRequest) -> None:
        self._request = request
        self._offsets: dict[int, TextOffsets] = {}
        """By index of the choice."""

    def choices(self, index: int, chunk: Chunk, stream: AsyncStream) -> Iterator[CompletionChoice]:
        """`index`: index of the choice."""
        logprobs, entries = None, chunk.logprobs
        if self._request.logprobs is not None:
            offsets = self._offsets.get(index)
            if offsets is None:
                offsets = self._offsets[index] = TextOffsets()
                entries = (*stream.prompt_logprobs, *entries) if self._request.echo else entries
            offsets.add_text(chunk.text)
            logprobs = of_completion(entries, self._request.logprobs, offsets) if entries else None
        if chunk.finish_reason is None:
            yield CompletionChoice(index=index, text=chunk.text, logprobs=logprobs)
        else:
            yield CompletionChoice(index=index, text=chunk.text, logprobs=logprobs, **end_of(chunk))
