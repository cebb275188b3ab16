"""/v1/completions, and what the gateway itself does for `echo` and `best_of`."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.answers import completion
from gateway.answers.completion import CompletionDeltas
from gateway.answers.objects import CompletionChoice, Usage
from gateway.api.call import GenerationCall, Item, read
from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway
from gateway.requests.completion import REFUSED, WITHOUT_MEANING, CompletionRequest
from gateway.requests.guides import guide_of
from sluice import client
from sluice.client import AsyncStream, Chunk, FinishReason, Generation, Output, Prompt

STOPPED = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)


async def complete(gateway: Gateway, exchange: Exchange) -> bytes | None:
    """Raises ApiError."""
    body = await read(gateway, exchange, CompletionRequest, REFUSED, WITHOUT_MEANING)
    return await CompletionCall(gateway, exchange, body.fields).respond()


class CompletionCall(GenerationCall[CompletionRequest]):
    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, gateway: Gateway, exchange: Exchange, request: CompletionRequest) -> None:
        super().__init__(gateway, exchange, request, request.prompts(), guide_of(request))
        self._deltas = CompletionDeltas(request)

    def choices_of(self, generations: Sequence[Generation]) -> Iterable[CompletionChoice]:
        for number, generation in enumerate(generations):
            yield from completion.whole(generation, number * self._request.outputs, self._request)

    def deltas_of(self, item: Item) -> Iterable[CompletionChoice]:
        index = item.number * self._request.outputs + item.chunk.index
        chunk = _only_echoed(item.chunk) if self._request.only_echoes else item.chunk
        return () if chunk is None else self._deltas.choices(index, chunk, item.stream)

    def usage_of(self, parts: Iterable[client.Usage]) -> Usage:
        if self._request.only_echoes:
            parts = [replace(part, completion_tokens=0) for part in parts]
        return super().usage_of(parts)

    async def collect(self, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
        if self._request.only_echoes:
            return await _collect_echo(self.stream(prompt, options))
        if (options.get("n") or 1) >= (options.get("best_of") or 0):
            return await super().collect(prompt, options)
        # The ring supports `best_of` too, but only in Generate, which starts over when its router is lost, while a
        # stream resumes. And the ring ranks outputs by the sum of log-probabilities, OpenAI's API by their mean.
        self._params["spec.n"] = "best_of"
        return _best_of(await super().collect(prompt, _all_outputs(options)), options)


def _only_echoed(chunk: Chunk) -> Chunk | None:
    """The chunk without what belongs to the output; None if nothing is left. For completions with `echo` and
    `max_tokens: 0`, which score a prompt: the ring generates one token, which is dropped."""
    if chunk.finish_reason is not None:
        return Chunk(chunk.index, finish_reason=FinishReason.LENGTH)
    # Later chunks have tokens, or text that was held back after tokens.
    return None if chunk.token_count or chunk.token_offset else chunk


async def _collect_echo(stream: AsyncStream) -> Generation:
    """The complete result without the output's token. Raises SluiceError."""
    texts: dict[int, str] = {}
    async with stream:
        async for chunk in stream:
            kept = _only_echoed(chunk)
            texts[chunk.index] = texts.get(chunk.index, "") + (kept.text if kept else "")
    generation = await stream.collect()
    outputs = (
        Output(index, text, (), (), FinishReason.LENGTH, None, None, None, None)
        for index, text in sorted(texts.items())
    )
    return Generation(generation.request_id, tuple(outputs), generation.usage, None, generation.prompt_logprobs, ())


def _all_outputs(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a stream that returns every output, with the log-probabilities by which they are compared."""
    rest = {name: value for name, value in options.items() if name != "best_of"}
    return {"logprobs": 0} | rest | {"n": options["best_of"]}


def _best_of(generation: Generation, options: Mapping[str, Any]) -> Generation:
    """The `n` most likely outputs, best first. `options`: as the caller gave them."""
    best = sorted(generation.outputs, key=_by_likelihood)[: options.get("n") or 1]
    shown = "logprobs" in options
    outputs = (
        replace(output, index=index, logprobs=output.logprobs if shown else ()) for index, output in enumerate(best)
    )
    return replace(generation, outputs=tuple(outputs))


def _by_likelihood(output: Output) -> tuple[bool, float, int]:
    """Sort key: most likely per token first. Outputs that were stopped before their end come last."""
    mean = (output.cumulative_logprob or 0.0) / max(1, len(output.logprobs))
    # NaN would make the order undefined.
    return output.finish_reason in STOPPED, math.inf if math.isnan(mean) else -mean, output.index
