"""A client on the simulated ring: the library's own Resume and Attempts, over two routers."""

import asyncio
from dataclasses import dataclass, field
from random import Random

from router.errors import RequestError
from sluice.client.attempts import Attempts, tells_of_router
from sluice.client.errors import AlreadyExists, InvalidRequest, LostEvents, Overloaded, SluiceError, Unavailable
from sluice.client.resume import Resume
from sluice.v1 import generation_pb2 as pb

KINDS = {
    "UNAVAILABLE": Unavailable,
    "RESOURCE_EXHAUSTED": Overloaded,
    "ALREADY_EXISTS": AlreadyExists,
    "INVALID_ARGUMENT": InvalidRequest,
}


@dataclass
class Story:
    """What a client was told, by output."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    ends: dict[int, list[str]] = field(default_factory=dict)
    usage: tuple[int, int] | None = None
    faults: list[str] = field(default_factory=list)
    resumed: int = 0


class SimClient:
    """Asks once, and goes on until it has everything."""

    def __init__(self, spec: pb.GenerationSpec, at: float, slow: float, random: Random, routers) -> None:
        """`routers` gives those that can be called now, by place; `slow`: chance of a long pause after an event."""
        self.story = Story()
        self._spec = pb.GenerationSpec()
        self._spec.CopyFrom(spec)
        self._at = at
        self._slow = slow
        self._random = random
        self._routers = routers
        self._current = random.randrange(2)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._at)
        attempts = Attempts(2, None, 120.0, 120.0, loop.time())
        resume = Resume(self._spec, attempts)
        while not resume.complete:
            try:
                await self._attempt(resume, loop.time())
                raise LostEvents("the stream ended without its last event")
            except SluiceError as error:
                if resume.complete or (isinstance(error, Unavailable) and resume.ends_here()):
                    break
                if tells_of_router(error):
                    self._current = 1 - self._current
                try:
                    await asyncio.sleep(attempts.failed(error, loop.time()))
                except SluiceError as final:
                    self.story.faults.append(f"{type(final).__name__} {final.reason}: {final}")
                    return
        self.story.resumed = resume.resumed
        usage = resume.usage
        self.story.usage = (usage.prompt_tokens, usage.completion_tokens)

    async def _attempt(self, resume: Resume, now: float) -> None:
        router = self._routers()[self._current]
        if router is None:
            raise Unavailable("nobody listens")
        lost: list[SluiceError] = []

        async def write(event: pb.GenerateStreamResponse) -> None:
            await asyncio.sleep(0.0005)
            if self._random.random() < self._slow:
                await asyncio.sleep(self._random.uniform(0.5, 4.0))
            try:
                for chunk in resume.take(event):
                    self._hear(chunk)
            except SluiceError as error:
                lost.append(error)
                raise asyncio.CancelledError from None

        request = pb.GenerateStreamRequest()
        request.CopyFrom(resume.request(now))
        try:
            await router.stream(request, write)
        except RequestError as error:
            kind = KINDS.get(error.code.status, SluiceError)
            raise kind(error.message, reason=error.code.name, retry_after=error.code.retry_after) from None
        except asyncio.CancelledError:
            if lost:
                raise lost[0] from None
            if router.alive:
                raise
            raise Unavailable("the connection broke") from None

    def _hear(self, chunk) -> None:
        story = self.story
        tokens = story.tokens.setdefault(chunk.index, [])
        if chunk.index in story.ends:
            story.faults.append(f"output {chunk.index} goes on after its end")
        if chunk.finish_reason is not None:
            story.ends.setdefault(chunk.index, []).append(
                f"{chunk.finish_reason} {chunk.stop_string or chunk.stop_token_id or ''}"
            )
            return
        if chunk.token_offset != len(tokens) or chunk.token_count != len(chunk.token_ids):
            story.faults.append(
                f"output {chunk.index}: {chunk.token_count} tokens at {chunk.token_offset} after {len(tokens)}"
            )
        tokens.extend(chunk.token_ids)
        story.text[chunk.index] = story.text.get(chunk.index, "") + chunk.text
