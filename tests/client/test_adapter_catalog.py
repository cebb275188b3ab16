"""What LoRA adapters and prompt adapters have in common: lists, unloading, and failures of routers."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from sluice.client import (
    AdapterNotFound,
    AsyncClient,
    Client,
    Forbidden,
    Lora,
    PromptAdapter,
    RouterLoras,
    RouterPromptAdapters,
    Unavailable,
)
from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure


@dataclass
class Kind:
    name: str
    of_router: Callable[..., Any]
    adapter: Callable[..., Any]
    size: str
    one_source: str
    """Part of the error if not exactly one source is given."""

    def load(self, client, **source):
        return getattr(client, f"load_{self.name}")("x", **source)

    def unload(self, client):
        return getattr(client, f"unload_{self.name}")("x")

    def list(self, client):
        return getattr(client, f"list_{self.name}s")()

    def at(self, script) -> dict[str, Any]:
        """The adapters of a fake router by id."""
        return getattr(script, f"{self.name}s")

    def message(self, adapter_id: str, size: int = 1, **fields: str) -> Any:
        kind = admin_pb2.Lora if self.name == "lora" else admin_pb2.PromptAdapter
        return kind(**{f"{self.name}_id": adapter_id, self.size: size}, **fields)


@pytest.fixture(params=["lora", "prompt_adapter"])
def kind(request):
    if request.param == "lora":
        return Kind("lora", RouterLoras, Lora, "rank", "give either path")
    return Kind("prompt_adapter", RouterPromptAdapters, PromptAdapter, "rows", "give exactly one of rows; folder")


async def test_all_pages_are_listed(kind, both, script, second) -> None:
    kind.at(script).update({name: kind.message(name) for name in "abcde"})
    kind.at(second)["f"] = kind.message("f", 2, path="/f", version="v")
    expected = [
        kind.of_router(both[0], tuple(kind.adapter(name, "", 1) for name in "abcde")),
        kind.of_router(both[1], (kind.adapter("f", "v", 2, "/f"),)),
    ]
    with Client(both) as client:
        assert kind.list(client) == expected
    async with AsyncClient(both) as client:
        assert await kind.list(client) == expected
    assert [request.page_token for request in script.seen] == ["", "b", "d"] * 2
    assert len(second.seen) == 2


async def test_unloading_fails_if_no_router_has_the_adapter(kind, both, script, second) -> None:
    """A router that has learned of the change from another router counts as successful."""
    for router in (script, second):
        kind.at(router)["x"] = kind.message("x")
        with Client(both) as client:
            assert kind.unload(client) == [kind.of_router(router_address) for router_address in both]
            with pytest.raises(AdapterNotFound, match=f"{kind.name}_id is 'x'; no adapter is loaded under this id"):
                kind.unload(client)
        assert not kind.at(router)
    async with AsyncClient(both) as client:
        with pytest.raises(AdapterNotFound):
            await kind.unload(client)


async def test_a_failure_of_one_router_is_in_its_result(kind, both, script) -> None:
    """If one router succeeded, no error is raised. Calls are not retried."""
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE)
    with Client(both, retry_timeout=10) as client:
        failed, loaded = kind.load(client, path="/a")
        assert isinstance(failed.error, Unavailable)
        assert failed == kind.of_router(both[0], error=failed.error)
        assert loaded == kind.of_router(both[1], (kind.adapter("x", "1", 8, "/a"),))
        assert [type(result.error) for result in kind.list(client)] == [Unavailable, type(None)]
    async with AsyncClient(both, retry_timeout=10) as client:
        assert [type(result.error) for result in await kind.unload(client)] == [Unavailable, type(None)]
    assert len(script.seen) == 3


async def test_the_first_error_is_raised_if_all_routers_failed(kind, both, script, second) -> None:
    script.failure = second.failure = Failure(grpc.StatusCode.PERMISSION_DENIED, "adapters are loaded with a token")
    with Client(both) as client:
        for call in (lambda: kind.load(client, path="/a"), lambda: kind.unload(client), lambda: kind.list(client)):
            with pytest.raises(Forbidden, match="with a token"):
                call()
    async with AsyncClient(both) as client:
        with pytest.raises(Forbidden):
            await kind.list(client)


@pytest.mark.parametrize("source", [{}, {"path": "/a", "folder": "b"}])
async def test_exactly_one_source_is_required(kind, address, script, source) -> None:
    with Client(address) as client, pytest.raises(TypeError, match=kind.one_source):
        kind.load(client, **source)
    async with AsyncClient(address) as client:
        with pytest.raises(TypeError, match=kind.one_source):
            await kind.load(client, **source)
    assert not script.seen
