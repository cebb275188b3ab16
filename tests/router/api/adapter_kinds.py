"""Calls about adapters of either kind, for the tests of what both have in common."""

from dataclasses import dataclass
from typing import Any

from sluice.v1 import admin_pb2 as admin
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import AdapterEntries, AdapterEntry, StorePromptAdapter
from tests.fakes.prompt_files import write
from tests.router.api import adapter_calls, prompt_adapter_calls
from tests.router.conftest import text_spec


@dataclass
class Kind:
    text: str
    """In error messages."""
    title: str
    """In names of calls and messages."""
    name: str
    """In names of fields."""
    configured: str
    """Setting of the adapters to load at the start."""
    adapters: str
    """Attribute of a router and of an engine that has them."""
    paths: dict[str, str]
    """Folders of the adapters a and b."""
    versions: dict[str, str]

    @property
    def id_field(self) -> str:
        return f"{self.name}_id"

    async def _call(self, client, verb: str, titles: str, **fields: Any) -> Any:
        request = getattr(admin, f"{verb}{titles}Request")(**fields)
        return await getattr(client.models, f"{verb}{titles}")(request)

    async def load(self, client, adapter_id: str, content: str = "a") -> Any:
        answer = await self._call(client, "Load", self.title, **{self.id_field: adapter_id}, path=self.paths[content])
        return getattr(answer, self.name)

    async def unload(self, client, adapter_id: str) -> None:
        await self._call(client, "Unload", self.title, **{self.id_field: adapter_id})

    async def listed(self, client, **page: Any) -> tuple[list[str], str]:
        """Ids of a page, and the token of the next one."""
        answer = await self._call(client, "List", f"{self.title}s", **page)
        return [getattr(each, self.id_field) for each in getattr(answer, f"{self.name}s")], answer.next_page_token

    def spec(self, adapter_id: str, **fields: Any) -> pb.GenerationSpec:
        return text_spec(**{self.id_field: adapter_id}, **fields)

    def version_at(self, client, adapter_id: str) -> str | None:
        entries = {entry.id: entry for entry in getattr(client.router.ring, self.adapters).loaded()}
        return entries[adapter_id].version if adapter_id in entries else None

    def stored(self, engine) -> list[str]:
        """Ids of the entries that the engine has."""
        changes = getattr(engine, self.adapters).changes_since(0)
        return [] if changes is None else [entry.id for entry in changes.entries]

    def tell(self, engine, entry: AdapterEntry) -> None:
        """Send an engine an entry, like another router."""
        if self.name == "lora":
            engine.adapters.on_message(AdapterEntries(engine.epoch, [entry]))
        else:
            table = None if entry.removed else prompt_adapter_calls.table_of(prompt_adapter_calls.B)
            engine.prompt_adapters.on_message(StorePromptAdapter(engine.epoch, entry, table))


def loras() -> Kind:
    versions = {"a": adapter_calls.A.version, "b": adapter_calls.B.version}
    return Kind("adapter", "Lora", "lora", "lora_adapters", "adapters", {"a": "/a", "b": "/b"}, versions)


def prompt_adapters(folder) -> Kind:
    rows = {"a": prompt_adapter_calls.A, "b": prompt_adapter_calls.B}
    paths = {name: str(write(folder / name, table)) for name, table in rows.items()}
    versions = {name: prompt_adapter_calls.table_of(table).digest.hex() for name, table in rows.items()}
    return Kind(
        "prompt adapter", "PromptAdapter", "prompt_adapter", "prompt_adapters", "prompt_adapters", paths, versions
    )
