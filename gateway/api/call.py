"""What completions and chats share: one HTTP request becomes calls to the ring, whose results become one response."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from gateway.answers.ends import RunningUsage, usage_of
from gateway.answers.event_stream import ChunkEvents, EventStream, event
from gateway.answers.objects import Answer, End, Usage
from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway, ring_errors
from gateway.requests.body import Body, decode
from gateway.requests.common import Common
from gateway.requests.guides import Guide, check_unknown
from sluice import client
from sluice.client import AsyncStream, Chunk, Generation, Prompt

JOINED_TOKENS = 32
"""Tokens per message from the ring when the answer is not streamed. If a router is lost, at most this many tokens of
each output are computed again."""
MAX_WAITING = 16
"""Chunks buffered for a slow client. When the buffer is full, the streams are not read."""

T = TypeVar("T", bound=Common)


async def read(
    gateway: Gateway, exchange: Exchange, kind: type[T], refused: tuple[str, ...], without_meaning: tuple[str, ...]
) -> Body[T]:
    """The decoded body, after the checks that need no guide or prompt. Raises ApiError."""
    body = decode(exchange.body, kind, refused, without_meaning)
    if body.unknown:
        gateway.counters.unknown_fields += len(body.unknown)
        check_unknown(body.unknown)
    request = body.fields
    request.check()
    exchange.notes["user"] = request.logged_user
    if request.truncate_prompt_tokens == -1:
        with ring_errors():
            models = await gateway.client.models(metadata=exchange.caller.metadata)
        request.truncate_to(max(model.max_context_tokens for model in models))
    return body


class Item(NamedTuple):
    """A chunk of one of several streams."""

    number: int
    """Index of the stream."""
    stream: AsyncStream
    chunk: Chunk


class GenerationCall(ABC, Generic[T]):
    prefix: str
    """Prefix of the answer's id."""
    whole_object: str
    """The field `object` of a complete answer."""
    chunk_object: str
    """The field `object` of a chunk."""

    def __init__(
        self, gateway: Gateway, exchange: Exchange, request: T, prompts: Sequence[Prompt], guide: Guide | None
    ) -> None:
        self._gateway = gateway
        self._exchange = exchange
        self._request = request
        self._prompts = prompts
        self._options = request.options()
        self._params = request.params()
        self._explain_guide = guide.explain if guide is not None else None
        if guide is not None:
            self._options["guided"] = guide.option
            self._params["spec.guided"] = guide.param
        self._created = int(time.time())

    @abstractmethod
    def choices_of(self, generations: Sequence[Generation]) -> Iterable[End]:
        """Complete choices. `generations`: one per prompt."""

    @abstractmethod
    def deltas_of(self, item: Item) -> Iterable[End]:
        """Choices of the answer's chunks that follow from one chunk of a stream."""

    def usage_of(self, parts: Iterable[client.Usage]) -> Usage:
        """The answer's usage. `parts`: one per prompt."""
        return usage_of(*parts)

    async def respond(self) -> bytes | None:
        """The complete answer; None after it has been streamed. Raises ApiError."""
        if not self._request.streams:
            return await self._whole()
        await EventStream(self._exchange.send).run(self._events())
        return None

    async def _whole(self) -> bytes:
        with ring_errors(self._params, self._explain_guide):
            generations = await _all(
                self.collect(prompt, self._options_of(i)) for i, prompt in enumerate(self._prompts)
            )
        choices = list(self.choices_of(generations))
        usage = self.usage_of(generation.usage for generation in generations)
        return msgspec.json.encode(self._answer(self.whole_object, choices, usage))

    async def _events(self) -> AsyncGenerator[bytes, None]:
        usage: UnsetType | None = None if self._request.wants_usage else UNSET
        counters, chunk_events = self._gateway.counters, ChunkEvents(self._answer(self.chunk_object, [], usage))
        running = RunningUsage() if self._request.wants_running_usage else None
        with ring_errors(self._params, self._explain_guide):
            streams = [
                self._gateway.client.stream(prompt, **self._options_of(i)) for i, prompt in enumerate(self._prompts)
            ]
            async with aclosing(_merged(streams)) as chunks:
                async for item in chunks:
                    so_far = running and running.add(*item)
                    for choice in self.deltas_of(item):
                        counters.events += 1
                        yield self._event_with(choice, so_far) if so_far else chunk_events.of(choice)
        if self._request.wants_usage:
            total = self.usage_of(stream.usage for stream in streams if stream.usage is not None)
            yield event(msgspec.json.encode(self._answer(self.chunk_object, [], total)))

    def _event_with(self, choice: End, usage: Usage) -> bytes:
        return event(msgspec.json.encode(self._answer(self.chunk_object, [choice], usage)))

    async def collect(self, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
        """The result for one prompt, collected from a stream, because a stream resumes when its router is lost."""
        return await self.stream(prompt, options).collect()

    def stream(self, prompt: Prompt, options: Mapping[str, Any]) -> AsyncStream:
        return self._gateway.client.stream(prompt, stream_interval=JOINED_TOKENS, **options)

    def _options_of(self, number: int) -> dict[str, Any]:
        """Options of the call for prompt `number`."""
        suffix = f"-{number}" if len(self._prompts) > 1 else ""
        request_id = self._exchange.caller.request_id + suffix
        return {**self._options, "request_id": request_id, "metadata": self._exchange.caller.metadata}

    def _answer(self, kind: str, choices: Sequence[End], usage: Usage | UnsetType | None) -> Answer:
        return Answer(
            id=self.prefix + self._exchange.caller.request_id,
            object=kind,
            created=self._created,
            model=self._request.model or self._gateway.served_model,
            choices=choices,
            usage=usage,
        )


async def _all(calls: Iterable[Any]) -> list[Generation]:
    """All results. The first error cancels the other calls. Raises SluiceError."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _merged(streams: Sequence[AsyncStream]) -> AsyncGenerator[Item, None]:
    """Chunks of all streams, in order of arrival. Closes the streams at the end."""
    if len(streams) == 1:
        async with streams[0] as stream:
            async for chunk in stream:
                yield Item(0, stream, chunk)
        return
    async with aclosing(_interleaved(streams)) as items:
        async for item in items:
            yield item


async def _interleaved(streams: Sequence[AsyncStream]) -> AsyncGenerator[Item, None]:
    queue: asyncio.Queue[Item | BaseException | None] = asyncio.Queue(MAX_WAITING)
    pumps = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    open_streams = len(pumps)
    try:
        while open_streams:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(number: int, stream: AsyncStream, queue: "asyncio.Queue[Item | BaseException | None]") -> None:
    try:
        async with stream:
            async for chunk in stream:
                await queue.put(Item(number, stream, chunk))
        await queue.put(None)
    except Exception as error:  # noqa: BLE001 - raised by the reader of the queue
        await queue.put(error)
