"""Prompt adapters of each router (ModelService.LoadPromptAdapter, UnloadPromptAdapter and ListPromptAdapters)."""

from dataclasses import dataclass
from typing import Any

from sluice.client.each_router import AdapterCatalog
from sluice.client.embeddings import embeddings_of
from sluice.client.errors import SluiceError
from sluice.client.loras import Folder, read_lora
from sluice.v1 import admin_pb2 as pb
from sluice.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class PromptAdapter:
    """A loaded prompt adapter."""

    prompt_adapter_id: str
    version: str
    """Hash of the embeddings. It changes when other embeddings are loaded under the same id."""
    rows: int
    """Number of virtual tokens."""
    path: str = ""
    """Folder on the routers' machines; empty: the adapter was uploaded."""


@dataclass(frozen=True, slots=True)
class RouterPromptAdapters:
    """The prompt adapters of one router, or its error."""

    address: str
    prompt_adapters: tuple[PromptAdapter, ...] = ()
    """From `load_prompt_adapter` the loaded adapter, from `list_prompt_adapters` all adapters by id; empty with an
    error."""
    error: SluiceError | None = None
    """Why the router's call failed."""


def load_request(
    prompt_adapter_id: str, path: str | None, folder: Folder | None, rows: Any, model: str
) -> pb.LoadPromptAdapterRequest:
    """Build the request, with the files of `folder`.

    Raises OSError or ValueError for unusable files, TypeError unless exactly one of the three is given.
    """
    if sum(source is not None for source in (path, folder, rows)) != 1:
        raise TypeError(
            "give exactly one of rows; folder, a folder on this machine; and path, a folder on the routers' machines"
        )
    request = pb.LoadPromptAdapterRequest(prompt_adapter_id=prompt_adapter_id, model=model)
    if path is not None:
        request.path = path
    elif folder is not None:
        request.files.CopyFrom(pb.PromptAdapterFiles(**read_lora(folder)))
    else:
        request.rows.CopyFrom(generation_pb2.Embeddings(**embeddings_of(rows)))
    return request


def _read(adapter: pb.PromptAdapter) -> PromptAdapter:
    return PromptAdapter(adapter.prompt_adapter_id, adapter.version, adapter.rows, adapter.path)


PROMPT_ADAPTERS = AdapterCatalog(
    RouterPromptAdapters, "prompt_adapter", "prompt_adapters", _read, pb.ListPromptAdaptersRequest
)
