"""The asyncio client."""

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2_grpc

from sluice.client.connection import DEFAULT_ADDRESS, Metadata, open_channel
from sluice.client.errors import ModelNotFound, from_call_error, is_task_cancelled
from sluice.client.options import Options, Prompt
from sluice.client.requests import (
    abort_request,
    detokenize_request,
    generate_request,
    health_request,
    stream_request,
    tokenize_request,
)
from sluice.client.results import Generation, Tokenization, is_serving, read_generation, read_tokenization
from sluice.client.steps import AsyncSteps
from sluice.client.streams import AsyncStream
from sluice.v1 import admin_pb2, admin_pb2_grpc, generation_pb2_grpc


class AsyncClient:
    """A connection to a Sluice server, for the event loop it is made in. Calls raise `SluiceError`.

    `timeout` is the default of every call, in seconds; None waits for ever. Raises RuntimeError outside a loop.
    """

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        timeout: float | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
    ) -> None:
        asyncio.get_running_loop()
        self.address = address
        self._timeout = timeout
        self._metadata = metadata
        self._channel = open_channel(aio, address, credentials)
        self._generation: Any = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models: Any = admin_pb2_grpc.ModelServiceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)
        self._health: Any = health_pb2_grpc.HealthStub(self._channel)

    async def generate(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> Generation:
        """Generate and return everything at the end. Raises TypeError for an unknown option."""
        return read_generation(await self._call(self._generation.Generate, generate_request(prompt, options), timeout))

    def stream(self, prompt: Prompt, *, timeout: float | None = None, **options: Unpack[Options]) -> AsyncStream:
        """Start to generate and return an asynchronous iterator of chunks. Raises TypeError for an unknown option."""
        return AsyncStream(self._start(self._generation.GenerateStream, stream_request(prompt, options), timeout))

    async def abort(self, request_id: str, reason: str = "") -> bool:
        """Stop a request, also of another connection. False: no such request was live."""
        return bool((await self._call(self._generation.Abort, abort_request(request_id, reason))).aborted)

    async def tokenize(
        self, text: str, *, model: str = "", add_special_tokens: bool | None = None, offsets: bool = False
    ) -> Tokenization:
        """Token ids of a text, as the server would see it as a prompt."""
        request = tokenize_request(text, model, add_special_tokens, offsets)
        return read_tokenization(await self._call(self._generation.Tokenize, request))

    async def detokenize(
        self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool | None = None
    ) -> str:
        """Text of token ids."""
        request = detokenize_request(token_ids, model, skip_special_tokens)
        return str((await self._call(self._generation.Detokenize, request)).text)

    async def models(self) -> list[admin_pb2.Model]:
        """Models served."""
        return list((await self._call(self._models.ListModels, admin_pb2.ListModelsRequest())).models)

    async def stats(self) -> admin_pb2.Stats:
        """Engines and detokenizers, now."""
        stats: admin_pb2.Stats = (await self._call(self._admin.GetStats, admin_pb2.GetStatsRequest())).stats
        return stats

    def stream_steps(self, *, timeout: float | None = None) -> AsyncSteps:
        """What engines do, step by step, and what becomes of requests. `timeout` ends it; the default one does not."""
        call = self._admin.StreamSteps(admin_pb2.StreamStepsRequest(), timeout=timeout, metadata=self._metadata)
        return AsyncSteps(call)

    async def health(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Whether the server, or one of its services such as "sluice.v1.GenerationService", is ready."""
        try:
            return is_serving(await self._call(self._health.Check, health_request(service), timeout))
        except ModelNotFound:
            return False

    async def close(self) -> None:
        """Close the connection; what still runs over it is cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _start(self, method: Any, request: Any, timeout: float | None) -> Any:
        limit = self._timeout if timeout is None else timeout
        return method(request, timeout=limit, metadata=self._metadata)

    async def _call(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        try:
            return await self._start(method, request, timeout)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            if is_task_cancelled():
                raise
            raise from_call_error(error) from None
