"""The asyncio client."""

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc import aio

from sluice.client.connection import DEFAULT_ADDRESS, ClientOptions
from sluice.client.errors import ModelNotFound, SluiceError, from_call_error, is_task_cancelled
from sluice.client.options import Options, Prompt
from sluice.client.requests import (
    abort_request,
    build_spec,
    detokenize_request,
    generate_request,
    health_request,
    tell_deaths,
    tokenize_request,
)
from sluice.client.results import Generation, Tokenization, is_serving, read_generation, read_tokenization
from sluice.client.routers import Method, Router, Routers, any_says
from sluice.client.steps import AsyncSteps
from sluice.client.streams import AsyncStream
from sluice.v1 import admin_pb2


class AsyncClient:
    """Calls to a Sluice server, for the event loop it is made in. They raise `SluiceError`.

    `addresses` and errors of options are as for `Client`. Raises RuntimeError outside a loop.
    """

    def __init__(self, addresses: str | Sequence[str] = DEFAULT_ADDRESS, **options: Unpack[ClientOptions]) -> None:
        asyncio.get_running_loop()
        self._routers = Routers(aio, addresses, **options)

    @property
    def addresses(self) -> tuple[str, ...]:
        """All routers."""
        return self._routers.addresses

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Generation:
        """Generate and return everything at the end. Raises TypeError for an unknown option."""
        request = generate_request(prompt, options)
        return read_generation(await self._call(lambda router: router.generation.Generate, request, timeout))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """Start to generate and return an asynchronous iterator of chunks. Raises TypeError for an unknown option."""
        return AsyncStream(build_spec(prompt, options), self._routers, timeout)

    async def abort(self, request_id: str, reason: str = "") -> bool:
        """Stop a request, also of another connection. False: no such request was live at any router."""
        request = abort_request(request_id, reason)
        return await self._any(lambda router: router.generation.Abort, request, lambda answer: answer.aborted)

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, offsets: bool = False
    ) -> Tokenization:
        """Token ids of a text, as the server would see it as a prompt."""
        request = tokenize_request(text, model, add_special_tokens, offsets)
        return read_tokenization(await self._call(lambda router: router.generation.Tokenize, request))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None
    ) -> str:
        """Text of token ids."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        return str((await self._call(lambda router: router.generation.Detokenize, request)).text)

    async def models(self) -> list[admin_pb2.Model]:
        """Models served."""
        return list((await self._call(lambda router: router.models.ListModels, admin_pb2.ListModelsRequest())).models)

    async def stats(self) -> admin_pb2.Stats:
        """Engines and detokenizers, now."""
        stats: admin_pb2.Stats = (
            await self._call(lambda router: router.admin.GetStats, admin_pb2.GetStatsRequest())
        ).stats
        return stats

    def stream_steps(self, *, timeout: float | None = None) -> AsyncSteps:
        """What engines do, step by step, and what becomes of requests. `timeout` ends it; the default one does not."""
        router = self._routers.current
        request = admin_pb2.StreamStepsRequest()
        call = self._routers.start(router, lambda each: each.admin.StreamSteps, request, timeout)
        return AsyncSteps(call, partial(self._routers.leave, router))

    async def health(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Whether a router, or one of its services such as "sluice.v1.GenerationService", is ready."""
        try:
            return await self._any(lambda router: router.health.Check, health_request(service), is_serving, timeout)
        except ModelNotFound:
            return False

    async def close(self) -> None:
        """Close the connections; what still runs over them is cancelled."""
        self._routers.close()
        await asyncio.gather(*(router.channel.close() for router in self._routers.all))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _call(self, method: Method, request: Any, timeout: float | None = None) -> Any:
        attempts = self._routers.attempts(timeout)
        while True:
            router = self._routers.current
            try:
                answer = await self._ask(router, method, request, attempts.left(time.monotonic()))
                attempts.admitted()
                return answer
            except SluiceError as failure:
                error = failure
            await asyncio.sleep(self._routers.failed(router, error, attempts))
            self._routers.check_open()
            tell_deaths(request, attempts.engine_deaths)

    async def _any(
        self, method: Method, request: Any, yes: Callable[[Any], bool], timeout: float | None = None
    ) -> bool:
        left = self._routers.attempts(timeout).left(time.monotonic())
        calls = (self._ask(router, method, request, left) for router in self._routers.all)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        return any_says(yes, answers)

    async def _ask(self, router: Router, method: Method, request: Any, timeout: float | None) -> Any:
        try:
            return await self._routers.start(router, method, request, timeout)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if is_task_cancelled():
                raise
            raise from_call_error(error) from None
