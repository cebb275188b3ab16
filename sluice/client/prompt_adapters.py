"""Prompt adapters of each router (ModelService.LoadPromptAdapter, UnloadPromptAdapter and ListPromptAdapters)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sluice.client.connection import Router
from sluice.client.each_router import Listing, each_result, failed, of_unloads
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


def listing(router: Router) -> Listing:
    return Listing(
        router, pb.ListPromptAdaptersRequest, lambda answer: [_read(adapter) for adapter in answer.prompt_adapters]
    )


def read_loaded(addresses: Sequence[str], answers: Sequence[Any]) -> list[RouterPromptAdapters]:
    """Read answers of LoadPromptAdapter, or errors. Raises the first error if all routers failed."""
    results = [failed(answer) or (_read(answer.prompt_adapter),) for answer in answers]
    return each_result(addresses, results, RouterPromptAdapters)


def read_unloaded(addresses: Sequence[str], answers: Sequence[Any]) -> list[RouterPromptAdapters]:
    """Read answers of UnloadPromptAdapter, or errors. Raises the first error if all routers failed."""
    return each_result(addresses, of_unloads(answers), RouterPromptAdapters)


def read_lists(addresses: Sequence[str], lists: Sequence[Listing]) -> list[RouterPromptAdapters]:
    """Read the complete lists of all routers. Raises the first error if all routers failed."""
    return each_result(addresses, [listing.result for listing in lists], RouterPromptAdapters)


def _read(adapter: pb.PromptAdapter) -> PromptAdapter:
    return PromptAdapter(adapter.prompt_adapter_id, adapter.version, adapter.rows, adapter.path)
