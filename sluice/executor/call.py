"""One request on its way to the server and back."""

import asyncio
from collections.abc import Callable

from sluice.client import AsyncClient, Chunk, Generation, Overloaded
from sluice.executor.inbox import Ending, Inbox
from sluice.executor.request import GenerationRequest

RETRY_SECONDS = 1.0


class Call:
    """Lives in the session's thread. `patient`: an overloaded server is asked again when it says so.

    `ended` is called after the inbox has the ending.
    """

    def __init__(
        self, wire_id: str, request: GenerationRequest, inbox: Inbox, patient: bool, ended: Callable[[], None] | None
    ) -> None:
        self.wire_id = wire_id
        self.sent = False
        """The server may know of it."""
        self.dropped = False
        """This side wanted it to end."""
        self.task: asyncio.Task[None]
        self._request = request
        self._inbox = inbox
        self._patient = patient
        self._ended = ended

    async def run(self, client: AsyncClient, room: asyncio.Semaphore) -> None:
        """Wait for room, send, and put what comes into the inbox. Raises SluiceError, TypeError."""
        async with room:
            while True:
                self.sent = True
                try:
                    await (self._stream(client) if self._request.streaming else self._whole(client))
                    return
                except Overloaded as error:
                    if not self._patient:
                        raise
                    delay = error.retry_after or RETRY_SECONDS
                self.sent = False
                await asyncio.sleep(delay)

    def end(self, error: BaseException | None) -> None:
        """The task is over, with this error or well."""
        if isinstance(error, Exception):
            self._inbox.end(Ending(cancelled=True) if self.dropped else Ending(error=error))
        if self._ended is not None:
            self._ended()

    async def _whole(self, client: AsyncClient) -> None:
        generation = await client.generate(self._request.inputs, **self._request.client_options(self.wire_id))
        *others, last = _chunks(generation)
        for chunk in others:
            self._inbox.put(chunk)
        self._inbox.end(Ending(generation.usage, generation.timings, generation.prompt_logprobs), last)

    async def _stream(self, client: AsyncClient) -> None:
        last: Chunk | None = None
        stream = client.stream(self._request.inputs, **self._request.client_options(self.wire_id))
        async for chunk in stream:
            # The end of an output waits for what follows: it may be the request's own, and these are read together.
            if last is not None:
                self._inbox.put(last)
            last = chunk if chunk.finish_reason is not None else None
            if last is None:
                self._inbox.put(chunk)
        self._inbox.end(Ending(stream.usage, stream.timings, stream.prompt_logprobs), last)


def _chunks(generation: Generation) -> list[Chunk]:
    tensors = [Chunk(index=tensor.index, tensor=tensor) for tensor in generation.tensors]
    outputs = [
        Chunk(
            index=output.index,
            text=output.text,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            token_count=len(output.token_ids),
            finish_reason=output.finish_reason,
            stop_string=output.stop_string,
            stop_token_id=output.stop_token_id,
            completion_tokens=len(output.token_ids),
            cumulative_logprob=output.cumulative_logprob,
        )
        for output in generation.outputs
    ]
    return [*tensors, *outputs]
