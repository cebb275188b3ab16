"""The LoRA adapters of an executor's requests: each is loaded on the server when a request first uses it."""

import asyncio
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial

from sluice.client import AdapterNotFound, AsyncClient, Overloaded, RouterLoras
from sluice.executor.request import LoRARequest

Loading = asyncio.Task[None]


class UsedAdapter:
    """One that requests use now, or did."""

    def __init__(self, request: LoRARequest) -> None:
        self.request = request
        self.users = 0
        self.loading: Loading | None = None
        """None: it is not on the server."""

    @property
    def is_idle(self) -> bool:
        return not self.users and self.loading is not None and self.loading.done()


class Adapters:
    """All calls are in the event loop of `client`."""

    def __init__(self, client: AsyncClient, uploads: bool) -> None:
        """`uploads`: paths are of folders on this machine, and nobody else uses the server; otherwise they are of
        folders on the engines' machines."""
        self._client = client
        self._uploads = uploads
        self._used: OrderedDict[str, UsedAdapter] = OrderedDict()
        """By name, the latest used last."""

    @contextmanager
    def use(self, request: LoRARequest | None) -> Iterator[UsedAdapter | None]:
        """None: there is nothing to load. Raises ValueError for a name that stands for another adapter."""
        if request is None or not request.lora_path:
            yield None
            return
        adapter = self._used.setdefault(request.lora_name, UsedAdapter(request))
        if adapter.request != request:
            raise ValueError(f"{request} has the name of another adapter, {adapter.request}: choose another lora_name")
        self._used.move_to_end(request.lora_name)
        adapter.users += 1
        try:
            yield adapter
        finally:
            adapter.users -= 1
            self._drop_unloaded(adapter)

    async def load(self, adapter: UsedAdapter) -> Loading:
        """Returns what `lose` needs. Raises SluiceError, OSError, ValueError."""
        loading = adapter.loading
        if loading is None:
            loading = adapter.loading = asyncio.get_running_loop().create_task(self._load(adapter.request))
            loading.add_done_callback(partial(self._on_loaded, adapter))
        # Other requests wait for it too, when this one is cancelled.
        await asyncio.shield(loading)
        return loading

    def lose(self, adapter: UsedAdapter, loading: Loading) -> None:
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

    async def _load(self, request: LoRARequest) -> None:
        while True:
            try:
                await self._send(request)
                return
            except Overloaded:
                if not await self._unload_one():
                    raise

    async def _send(self, request: LoRARequest) -> list[RouterLoras]:
        if self._uploads:
            return await self._client.load_lora(request.lora_name, folder=request.lora_path)
        return await self._client.load_lora(request.lora_name, path=request.lora_path)

    async def _unload_one(self) -> bool:
        """The least recently used one that no request needs now. False: there is none."""
        idle = next((each for each in self._used.values() if each.is_idle), None)
        # On a server that has other users, they may need it.
        if idle is None or not self._uploads:
            return False
        del self._used[idle.request.lora_name]
        with suppress(AdapterNotFound):
            await self._client.unload_lora(idle.request.lora_name)
        return True

    def _on_loaded(self, adapter: UsedAdapter, loading: Loading) -> None:
        if loading.cancelled() or loading.exception() is not None:
            self.lose(adapter, loading)
            self._drop_unloaded(adapter)

    def _drop_unloaded(self, adapter: UsedAdapter) -> None:
        name = adapter.request.lora_name
        if not adapter.users and adapter.loading is None and self._used.get(name) is adapter:
            del self._used[name]
