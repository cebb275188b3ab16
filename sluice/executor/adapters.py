"""The adapters of an executor's requests. Each is loaded on the server when a request first uses it."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from sluice.client import AdapterNotFound, AsyncClient, Overloaded
from sluice.executor.request import AdapterRequest, GenerationRequest

MAX_LOADS = 4
"""Concurrent loads of each kind of adapter: a router accepts no more uploads."""

Loading = asyncio.Task[None]


class UsedAdapter:
    """An adapter that requests use now, or have used."""

    def __init__(self, request: AdapterRequest, kind: "AdaptersOfKind") -> None:
        self.request = request
        self.users = 0
        """Requests that use the adapter now."""
        self.loading: Loading | None = None
        """The running or finished load; None: the adapter is not on the server."""
        self._kind = kind

    @property
    def is_idle(self) -> bool:
        return not self.users and self.loading is not None and self.loading.done()

    async def load(self) -> Loading:
        """Load the adapter, unless it is loaded, and return the load for `mark_missing`.

        Raises SluiceError, OSError, ValueError.
        """
        loading = self.loading
        if loading is None:
            loading = self.loading = asyncio.get_running_loop().create_task(self._kind.load(self.request))
            loading.add_done_callback(self._on_loaded)
        # Shielded, because other requests may be waiting for the same load when this one is cancelled.
        await asyncio.shield(loading)
        return loading

    def mark_missing(self, loading: Loading) -> None:
        """Note that the server has dropped the adapter, so that the next `load` loads it again."""
        # Another request may have noticed first, and begun the next load.
        if self.loading is loading:
            self.loading = None

    def _on_loaded(self, loading: Loading) -> None:
        if loading.cancelled() or loading.exception() is not None:
            self.mark_missing(loading)
            self._kind.drop_unloaded(self)


class AdaptersOfKind:
    """The LoRA adapters, or the prompt adapters, of an executor. Used on one event loop."""

    def __init__(
        self, load: Callable[..., Awaitable[Any]], unload: Callable[[str], Awaitable[Any]], uploads: bool
    ) -> None:
        """`load`, `unload`: methods of the client. `uploads`: see `Adapters`."""
        self._load_at_server = load
        self._unload_at_server = unload
        self._uploads = uploads
        self._loads = asyncio.Semaphore(MAX_LOADS)
        self._used: OrderedDict[str, UsedAdapter] = OrderedDict()
        """Adapters by name, least recently used first."""

    @contextmanager
    def use(self, request: AdapterRequest) -> Iterator[UsedAdapter]:
        """Keep the adapter in use within the `with` block. Raises ValueError if its name stands for another adapter."""
        adapter = self._used.setdefault(request.name, UsedAdapter(request, self))
        if adapter.request != request:
            raise ValueError(f"{request} has the name of another adapter, {adapter.request}: choose another name")
        self._used.move_to_end(request.name)
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            self.drop_unloaded(adapter)

    def drop_unloaded(self, adapter: UsedAdapter) -> None:
        """Forget the adapter if nothing uses it and it is not on the server."""
        name = adapter.request.name
        if not adapter.users and adapter.loading is None and self._used.get(name) is adapter:
            del self._used[name]

    def close(self) -> list[Loading]:
        """Cancel the running loads, and return them."""
        tasks = [adapter.loading for adapter in self._used.values() if adapter.loading is not None]
        for task in tasks:
            task.cancel()
        return tasks

    async def load(self, request: AdapterRequest) -> None:
        """Load an adapter. If the server has no room, unload others first."""
        while True:
            try:
                async with self._loads:
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
        """Unload the least recently used idle adapter. Returns False if none may be unloaded."""
        idle = next((adapter for adapter in self._used.values() if adapter.is_idle), None)
        # Never on a shared server, whose other clients may use the adapter.
        if idle is None or not self._uploads:
            return False
        del self._used[idle.request.name]
        with suppress(AdapterNotFound):
            await self._unload_at_server(idle.request.name)
        return True


class Adapters:
    """All adapters of an executor. Used on the event loop of `client`."""

    def __init__(self, client: AsyncClient, uploads: bool) -> None:
        """`uploads`: whether paths are folders on this machine, whose files are uploaded, and the server has no other
        client; otherwise paths are folders on the server's machines."""
        self._loras = AdaptersOfKind(client.load_lora, client.unload_lora, uploads)
        self._prompts = AdaptersOfKind(client.load_prompt_adapter, client.unload_prompt_adapter, uploads)

    @contextmanager
    def use(self, request: GenerationRequest) -> Iterator[list[UsedAdapter]]:
        """Keep the request's adapters in use within the `with` block.

        Raises ValueError if the name of one stands for another adapter.
        """
        named = ((self._loras, request.lora_request), (self._prompts, request.prompt_adapter_request))
        with ExitStack() as stack:
            # An adapter without a path is on the server already.
            to_load = [(kind, adapter) for kind, adapter in named if adapter is not None and adapter.path]
            yield [stack.enter_context(kind.use(adapter)) for kind, adapter in to_load]

    def close(self) -> list[Loading]:
        """Cancel the running loads, and return them."""
        return [*self._loras.close(), *self._prompts.close()]
