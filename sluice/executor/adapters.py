"""The adapters of an executor's requests: each is loaded on the server when a request first uses it."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

from sluice.client import AdapterNotFound, AsyncClient, Overloaded
from sluice.executor.request import GenerationRequest, LoRARequest, PromptAdapterRequest

MAX_LOADS = 4
"""Of a kind, at a time: a router takes no more uploads."""

AdapterRequest = LoRARequest | PromptAdapterRequest
Loading = asyncio.Task[None]


class UsedAdapter:
    """One that requests use now, or did."""

    def __init__(self, request: AdapterRequest) -> None:
        self.request = request
        self.users = 0
        self.loading: Loading | None = None
        """None: it is not on the server."""

    @property
    def is_idle(self) -> bool:
        return not self.users and self.loading is not None and self.loading.done()


class AdaptersOfKind:
    """LoRA adapters or prompt adapters. All calls are in one event loop."""

    def __init__(
        self, load: Callable[..., Awaitable[Any]], unload: Callable[[str], Awaitable[Any]], uploads: bool
    ) -> None:
        """`load`, `unload`: of the client. `uploads`: see `Adapters`."""
        self._load_at_server = load
        self._unload_at_server = unload
        self._uploads = uploads
        self._turn = asyncio.Semaphore(MAX_LOADS)
        self._used: OrderedDict[str, UsedAdapter] = OrderedDict()
        """By name, the latest used last."""

    @contextmanager
    def use(self, request: AdapterRequest) -> Iterator[UsedAdapter]:
        """Raises ValueError for a name that stands for another adapter."""
        adapter = self._used.setdefault(request.name, UsedAdapter(request))
        if adapter.request != request:
            raise ValueError(f"{request} has the name of another adapter, {adapter.request}: choose another name")
        self._used.move_to_end(request.name)
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            self._drop_unloaded(adapter)

    async def load(self, adapter: UsedAdapter) -> Loading:
        """Returns what `mark_missing` needs. Raises SluiceError, OSError, ValueError."""
        loading = adapter.loading
        if loading is None:
            loading = adapter.loading = asyncio.get_running_loop().create_task(self._load(adapter.request))
            loading.add_done_callback(partial(self._on_loaded, adapter))
        # Other requests wait for it too, when this one is cancelled.
        await asyncio.shield(loading)
        return loading

    def mark_missing(self, adapter: UsedAdapter, loading: Loading) -> None:
        """The server does not have what was loaded: the next `load` loads it again."""
        # Unless another request has noticed that before.
        if adapter.loading is loading:
            adapter.loading = None

    def close(self) -> list[Loading]:
        """Cancels the loads that run, and returns them."""
        tasks = [each.loading for each in self._used.values() if each.loading is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def _load(self, request: AdapterRequest) -> None:
        while True:
            try:
                async with self._turn:
                    await self._send(request)
                return
            except Overloaded:
                if not await self._unload_one():
                    raise

    async def _send(self, request: AdapterRequest) -> None:
        if self._uploads:
            await self._load_at_server(request.name, folder=request.path)
        else:
            await self._load_at_server(request.name, path=request.path)

    async def _unload_one(self) -> bool:
        """The least recently used one without users. False: every one has some."""
        idle = next((each for each in self._used.values() if each.is_idle), None)
        # On a server that has other users, they may need it.
        if idle is None or not self._uploads:
            return False
        del self._used[idle.request.name]
        with suppress(AdapterNotFound):
            await self._unload_at_server(idle.request.name)
        return True

    def _on_loaded(self, adapter: UsedAdapter, loading: Loading) -> None:
        if loading.cancelled() or loading.exception() is not None:
            self.mark_missing(adapter, loading)
            self._drop_unloaded(adapter)

    def _drop_unloaded(self, adapter: UsedAdapter) -> None:
        name = adapter.request.name
        if not adapter.users and adapter.loading is None and self._used.get(name) is adapter:
            del self._used[name]


class InUse(NamedTuple):
    """An adapter that one request needs."""

    kind: AdaptersOfKind
    adapter: UsedAdapter


class RequestAdapters:
    """Those that one request needs loaded."""

    def __init__(self, found: list[InUse]) -> None:
        self._found = found

    def __bool__(self) -> bool:
        return bool(self._found)

    async def load(self) -> list[Loading]:
        """Returns what `mark_missing` needs. Raises SluiceError, OSError, ValueError."""
        return [await kind.load(adapter) for kind, adapter in self._found]

    def mark_missing(self, loadings: list[Loading]) -> None:
        """The server does not have all of what was loaded: the next `load` loads it again."""
        for (kind, adapter), loading in zip(self._found, loadings, strict=True):
            kind.mark_missing(adapter, loading)


class Adapters:
    """All calls are in the event loop of `client`."""

    def __init__(self, client: AsyncClient, uploads: bool) -> None:
        """`uploads`: paths are of folders on this machine, and this is the server's only client; otherwise they are of
        folders on the server's machines."""
        self._loras = AdaptersOfKind(client.load_lora, client.unload_lora, uploads)
        self._prompts = AdaptersOfKind(client.load_prompt_adapter, client.unload_prompt_adapter, uploads)

    @contextmanager
    def use(self, request: GenerationRequest) -> Iterator[RequestAdapters]:
        """Raises ValueError for a name that stands for another adapter."""
        named = ((self._loras, request.lora_request), (self._prompts, request.prompt_adapter_request))
        with ExitStack() as stack:
            # An adapter without a path is on the server already.
            found = [(kind, adapter) for kind, adapter in named if adapter is not None and adapter.path]
            yield RequestAdapters([InUse(kind, stack.enter_context(kind.use(adapter))) for kind, adapter in found])

    def close(self) -> list[Loading]:
        """Cancels the loads that run, and returns them."""
        return [*self._loras.close(), *self._prompts.close()]
