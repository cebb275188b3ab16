"""`AsyncClient`: the client for asyncio."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

from grpc import aio
from grpc_health.v1 import health_pb2

from sluice.client import adapters, admin, requests
from sluice.client.adapters import LORAS, PROMPT_ADAPTERS, Folder, RouterLoras, RouterPromptAdapters
from sluice.client.admin import AsyncCacheEvents, AsyncSteps, RankAnswer, ServingVersion
from sluice.client.calls import AsyncCalls
from sluice.client.connection import DEFAULT_ADDRESS, ClientOptions, Metadata, Routers
from sluice.client.errors import ModelNotFound
from sluice.client.options import Message, Options, Prompt, TokenizeOptions
from sluice.client.results import Generation, Tokenization, is_serving, read_generation, read_tokenization
from sluice.client.streams import AsyncStream
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb


class AsyncClient:
    """A client of one or more interchangeable routers for the event loop that creates it.

    Its methods are those of `Client`, where their options, answers and errors are documented.

    ::

        async with AsyncClient("127.0.0.1:50051") as client:
            print((await client.generate("Hello", max_tokens=16)).text)
            async for chunk in client.stream("Hello", max_tokens=16):
                print(chunk.text, end="")

    After a router fails, calls go to the next one, and streams resume there. Calls raise `SluiceError`.
    """

    def __init__(self, addresses: str | Sequence[str] = DEFAULT_ADDRESS, **options: Unpack[ClientOptions]) -> None:
        """`addresses`: HOST:PORT of each router. Connects with the first call.

        Raises TypeError for an unknown option, ValueError for an invalid address or option, OSError for an unreadable
        certificate file, RuntimeError outside of an event loop.
        """
        asyncio.get_running_loop()
        self._routers = Routers(aio, addresses, **options)
        self._calls = AsyncCalls(self._routers)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._routers.addresses

    async def generate(
        self, prompt: Prompt, *, timeout: float | None = None, metadata: Metadata = (), **options: Unpack[Options]
    ) -> Generation:
        """Generate, and return the complete result, like `Client.generate`."""
        request = pb.GenerateRequest(spec=requests.build_spec(prompt, options))
        return read_generation(
            await self._calls.call(lambda router: router.generation.Generate, request, timeout, metadata)
        )

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, metadata: Metadata = (), **options: Unpack[Options]
    ) -> AsyncStream:
        """Start generating, and return an asynchronous iterator of `Chunk`, like `Client.stream`."""
        return AsyncStream(requests.build_spec(prompt, options), self._routers, timeout, metadata)

    async def abort(self, request_id: str, reason: str = "") -> bool:
        """Stop a request, also one that another client sent. Returns False if it runs at none of the routers."""
        request = pb.AbortRequest(request_id=request_id, reason=reason)
        return await self._calls.any(lambda router: router.generation.Abort, request, lambda response: response.aborted)

    async def tokenize(
        self, text: str | Sequence[Message], *, metadata: Metadata = (), **options: Unpack[TokenizeOptions]
    ) -> Tokenization:
        """Return the token ids of a text or a chat, like `Client.tokenize`."""
        request = requests.tokenize_request(text, options)
        return read_tokenization(
            await self._calls.call(lambda router: router.generation.Tokenize, request, metadata=metadata)
        )

    async def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        metadata: Metadata = (),
    ) -> str:
        """Return the text of token ids. Raises SluiceError."""
        request = requests.detokenize_request(token_ids, model, skip_special_tokens)
        return str(
            (await self._calls.call(lambda router: router.generation.Detokenize, request, metadata=metadata)).text
        )

    async def models(self, *, metadata: Metadata = ()) -> list[admin_pb2.Model]:
        """Return the served models. Raises SluiceError."""
        found: list[admin_pb2.Model] = []
        request = admin_pb2.ListModelsRequest()
        while True:
            answer = await self._calls.call(lambda router: router.models.ListModels, request, metadata=metadata)
            found += answer.models
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    async def stats(self) -> admin_pb2.Stats:
        """Return statistics of the engines and detokenizers. Raises SluiceError."""
        response = await self._calls.call(lambda router: router.admin.GetStats, admin_pb2.GetStatsRequest())
        stats: admin_pb2.Stats = response.stats
        return stats

    async def server_info(self) -> admin_pb2.GetServerInfoResponse:
        """Describe the router that answers, and the engines, detokenizers and models that it knows."""
        request = admin_pb2.GetServerInfoRequest()
        info: admin_pb2.GetServerInfoResponse = await self._calls.call(
            lambda router: router.admin.GetServerInfo, request
        )
        return info

    def stream_steps(self, *, timeout: float | None = None) -> AsyncSteps:
        """Return an iterator over the statistics of each engine step and request, like `Client.stream_steps`."""
        return AsyncSteps(
            self._routers, lambda router: router.admin.StreamSteps, admin_pb2.StreamStepsRequest(), timeout
        )

    def stream_cache_events(self, engine_id: str = "", *, timeout: float | None = None) -> AsyncCacheEvents:
        """Return an iterator over the KV cache events of one engine, or of all, like `Client.stream_cache_events`."""
        request = admin_pb2.StreamCacheEventsRequest(engine_id=engine_id)
        return AsyncCacheEvents(self._routers, lambda router: router.admin.StreamCacheEvents, request, timeout)

    async def call_engines(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[RankAnswer]:
        """Run a method, by name, on every rank of every engine, like `Client.call_engines`."""
        request = admin.call_request(method, args, kwargs, ranks, timeout)
        return admin.read_answers(
            await self._calls.call_once(lambda router: router.admin.CallEngines, request, admin.deadline(timeout))
        )

    async def serving_versions(self, *, timeout: float | None = None) -> list[ServingVersion]:
        """Return the model version that each router sends new requests to, like `Client.serving_versions`."""
        request = admin_pb2.GetServerInfoRequest()
        answers = await self._calls.call_each(lambda router: router.admin.GetServerInfo, request, timeout)
        return admin.read_info(self.addresses, answers)

    async def set_serving_version(self, version: str, *, timeout: float | None = None) -> list[ServingVersion]:
        """Make every router send new requests to engines with this label, like `Client.set_serving_version`."""
        request = admin_pb2.SetServingVersionRequest(version=version)
        answers = await self._calls.call_each(lambda router: router.admin.SetServingVersion, request, timeout)
        return admin.read_set(self.addresses, answers)

    async def load_lora(
        self,
        lora_id: str,
        *,
        path: str | None = None,
        folder: Folder | None = None,
        model: str = "",
        timeout: float | None = None,
        metadata: Metadata = (),
    ) -> list[RouterLoras]:
        """Load a LoRA adapter on all engines, through every router, like `Client.load_lora`."""
        adapters.check_lora_source(path, folder)
        if folder is None:
            request = admin_pb2.LoadLoraRequest(lora_id=lora_id, path=path or "", model=model)
            answers = await self._calls.call_each(lambda router: router.models.LoadLora, request, timeout, metadata)
        else:
            files = await asyncio.to_thread(adapters.AdapterFolder, folder)
            uploads = [adapters.Upload(lora_id, files, model) for _ in self.addresses]
            calls = zip(self._routers.all, uploads, strict=True)
            answers = await self._calls.call_all(lambda router: router.models.UploadLora, calls, timeout, metadata)
            adapters.raise_read_error(uploads)
        return LORAS.loaded(self.addresses, answers)

    async def unload_lora(
        self, lora_id: str, *, timeout: float | None = None, metadata: Metadata = ()
    ) -> list[RouterLoras]:
        """Unload a LoRA adapter at every router, like `Client.unload_lora`."""
        return await self._calls.unload_adapter(LORAS, lora_id, timeout, metadata)

    async def list_loras(self, *, timeout: float | None = None, metadata: Metadata = ()) -> list[RouterLoras]:
        """Return the LoRA adapters that each router lists, like `Client.list_loras`."""
        return await self._calls.list_adapters(LORAS, timeout, metadata)

    async def load_prompt_adapter(
        self,
        prompt_adapter_id: str,
        *,
        rows: Any = None,
        folder: Folder | None = None,
        path: str | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> list[RouterPromptAdapters]:
        """Load a prompt adapter at every router, like `Client.load_prompt_adapter`."""
        request = await asyncio.to_thread(adapters.prompt_adapter_request, prompt_adapter_id, path, folder, rows, model)
        answers = await self._calls.call_each(lambda router: router.models.LoadPromptAdapter, request, timeout)
        return PROMPT_ADAPTERS.loaded(self.addresses, answers)

    async def unload_prompt_adapter(
        self, prompt_adapter_id: str, *, timeout: float | None = None
    ) -> list[RouterPromptAdapters]:
        """Unload a prompt adapter at every router, like `Client.unload_prompt_adapter`."""
        return await self._calls.unload_adapter(PROMPT_ADAPTERS, prompt_adapter_id, timeout)

    async def list_prompt_adapters(self, *, timeout: float | None = None) -> list[RouterPromptAdapters]:
        """Return the prompt adapters that each router lists, like `Client.list_prompt_adapters`."""
        return await self._calls.list_adapters(PROMPT_ADAPTERS, timeout)

    async def health(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Return whether any router serves requests, or this gRPC service, like `Client.health`."""
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return await self._calls.any(lambda router: router.health.Check, request, is_serving, timeout)
        except ModelNotFound:
            return False

    async def close(self) -> None:
        """Close the connections, which cancels the running calls."""
        self._routers.close()
        await asyncio.gather(*(router.channel.close() for router in self._routers.all))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
