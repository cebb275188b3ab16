"""/v1/completions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gateway.answers import completion
from gateway.answers.completion import CompletionDeltas
from gateway.answers.event_stream import EventStream
from gateway.answers.objects import CompletionChoice, Usage
from gateway.api import only_echo
from gateway.api.call import GenerationCall
from gateway.api.chunks import Item
from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway
from gateway.api.reading import read
from gateway.requests.completion import REFUSED, WITHOUT_MEANING, CompletionRequest
from gateway.requests.guides import guide_of
from sluice import client
from sluice.client import Generation, Prompt


async def complete(gateway: Gateway, exchange: Exchange) -> bytes | None:
    """Raises ApiError."""
    body = await read(gateway, exchange, CompletionRequest, REFUSED, WITHOUT_MEANING)
    call = CompletionCall(gateway, exchange, body.fields)
    if not body.fields.streams:
        return await call.whole()
    await EventStream(exchange.send).run(call.events())
    return None


class CompletionCall(GenerationCall):
    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, gateway: Gateway, exchange: Exchange, request: CompletionRequest) -> None:
        super().__init__(gateway, exchange, request, request.prompts(), guide_of(request))
        self._completion = request
        self._deltas = CompletionDeltas(request)

    def choices_of(self, generations: Sequence[Generation]) -> Iterable[CompletionChoice]:
        for number, generation in enumerate(generations):
            yield from completion.whole(generation, number * self._completion.outputs, self._completion)

    def deltas_of(self, item: Item) -> Iterable[CompletionChoice]:
        index = item.number * self._completion.outputs + item.chunk.index
        chunk = only_echo.echoed(item.chunk) if self._completion.only_echoes else item.chunk
        return () if chunk is None else self._deltas.choices(index, chunk, item.stream)

    def usage_of(self, parts: Iterable[client.Usage]) -> Usage:
        if self._completion.only_echoes:
            parts = [replace(part, completion_tokens=0) for part in parts]
        return super().usage_of(parts)

    async def collect(self, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
        if self._completion.only_echoes:
            return await only_echo.collect(self.stream(prompt, options))
        return await super().collect(prompt, options)
