"""Common part of completions and chats: turns one HTTP request into calls of the ring, and their results into a
response."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from gateway.answers.ends import usage_of
from gateway.answers.event_stream import ChunkEvents, event
from gateway.answers.objects import Answer, End, Usage
from gateway.answers.running_usage import RunningUsage
from gateway.api import best_of
from gateway.api.chunks import Item, merged
from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway, ring_errors
from gateway.requests.common import Common
from gateway.requests.guides import Guide
from sluice import client
from sluice.client import AsyncStream, Generation, Prompt

JOINED_TOKENS = 32
"""Tokens per message of the ring when the answer is not streamed. If a router is lost, at most this many tokens of each
output are computed again."""


class GenerationCall(ABC):
    prefix: str
    """Prefix of the answer's id."""
    whole_object: str
    """The field `object` of a complete answer."""
    chunk_object: str
    """The field `object` of a chunk."""

    def __init__(
        self, gateway: Gateway, exchange: Exchange, request: Common, prompts: Sequence[Prompt], guide: Guide | None
    ) -> None:
        self._gateway = gateway
        self._caller = exchange.caller
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

    async def whole(self) -> bytes:
        """Raises ApiError."""
        with ring_errors(self._params, self._explain_guide):
            generations = await _all(self._generate(i, prompt) for i, prompt in enumerate(self._prompts))
        choices = list(self.choices_of(generations))
        usage = self.usage_of(generation.usage for generation in generations)
        return msgspec.json.encode(self._answer(self.whole_object, choices, usage))

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Raises ApiError."""
        usage: UnsetType | None = None if self._request.wants_usage else UNSET
        counters, chunk_events = self._gateway.counters, ChunkEvents(self._answer(self.chunk_object, [], usage))
        running = RunningUsage() if self._request.wants_running_usage else None
        with ring_errors(self._params, self._explain_guide):
            streams = [
                self._gateway.client.stream(prompt, **self._options_of(i)) for i, prompt in enumerate(self._prompts)
            ]
            async with aclosing(merged(streams)) as chunks:
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

    async def _generate(self, number: int, prompt: Prompt) -> Generation:
        """Collected from a stream, because a stream resumes when its router is lost."""
        options = self._options_of(number)
        if not best_of.wants_choice(options):
            return await self.collect(prompt, options)
        self._params["spec.n"] = "best_of"
        return best_of.chosen(await self.collect(prompt, best_of.all_outputs(options)), options)

    async def collect(self, prompt: Prompt, options: Mapping[str, Any]) -> Generation:
        return await self.stream(prompt, options).collect()

    def stream(self, prompt: Prompt, options: Mapping[str, Any]) -> AsyncStream:
        return self._gateway.client.stream(prompt, stream_interval=JOINED_TOKENS, **options)

    def _options_of(self, number: int) -> dict[str, Any]:
        """Options of the call for prompt `number`."""
        suffix = f"-{number}" if len(self._prompts) > 1 else ""
        request_id = self._caller.request_id + suffix
        return {**self._options, "request_id": request_id, "metadata": self._caller.metadata}

    def _answer(self, kind: str, choices: Sequence[End], usage: Usage | UnsetType | None) -> Answer:
        return Answer(
            id=self.prefix + self._caller.request_id,
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
