"""/v1/completions."""

from collections.abc import Iterable, Sequence

from gateway.answers import completion
from gateway.answers.completion import CompletionDeltas
from gateway.answers.event_stream import EventStream
from gateway.answers.objects import CompletionChoice
from gateway.api.call import Call
from gateway.api.chunks import Item
from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway
from gateway.requests.body import decode
from gateway.requests.completion import REFUSED, WITHOUT_MEANING, CompletionRequest
from gateway.requests.guides import guide_of
from sluice.client import Generation


async def complete(gateway: Gateway, exchange: Exchange) -> bytes | None:
    """Raises ApiError."""
    body = decode(exchange.body, CompletionRequest, REFUSED, WITHOUT_MEANING)
    gateway.counters.unknown_fields += body.unknown
    body.fields.check()
    exchange.notes["user"] = body.fields.logged_user
    call = CompletionCall(gateway, exchange, body.fields)
    if not body.fields.streams:
        return await call.whole()
    await EventStream(exchange.send).run(call.events())
    return None


class CompletionCall(Call):
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
        return self._deltas.choices(index, item.chunk, item.stream)
