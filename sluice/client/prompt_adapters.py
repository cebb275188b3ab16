"""Prompt adapters, router by router (ModelService.LoadPromptAdapter, UnloadPromptAdapter and ListPromptAdapters)."""

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
    """Hash of its rows: the same id loaded again with other rows has another one."""
    rows: int
    """Its virtual tokens."""
    path: str = ""
    """On the router's machine; empty: it was uploaded."""


@dataclass(frozen=True, slots=True)
class RouterPromptAdapters:
    """Of one router."""

    address: str
    prompt_adapters: tuple[PromptAdapter, ...] = ()
    """After `load_prompt_adapter` the new one, after `list_prompt_adapters` all, by id; empty with an error."""
    error: SluiceError | None = None
    """Why the router did not answer, or did not do it."""


def load_request(
    prompt_adapter_id: str, path: str | None, folder: Folder | None, rows: Any, model: str
) -> pb.LoadPromptAdapterRequest:
    """Reads the folder. Raises OSError, ValueError; TypeError unless one of the three is given."""
    if sum(each is not None for each in (path, folder, rows)) != 1:
        raise TypeError(
            "give one of rows, folder, a folder on this machine, and path, a folder on the routers' machines"
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
        router, pb.ListPromptAdaptersRequest, lambda answer: [_read(each) for each in answer.prompt_adapters]
    )


def read_loaded(addresses: Sequence[str], answers: Sequence[Any]) -> list[RouterPromptAdapters]:
    """Of LoadPromptAdapter, or errors. Raises the first error if no router loaded it."""
    results = [failed(each) or (_read(each.prompt_adapter),) for each in answers]
    return each_result(addresses, results, RouterPromptAdapters)


def read_unloaded(addresses: Sequence[str], answers: Sequence[Any]) -> list[RouterPromptAdapters]:
    """Of UnloadPromptAdapter, or errors. Raises the first error if no router unloaded it."""
    return each_result(addresses, of_unloads(answers), RouterPromptAdapters)


def read_lists(addresses: Sequence[str], lists: Sequence[Listing]) -> list[RouterPromptAdapters]:
    """Raises the first error if no router answered."""
    return each_result(addresses, [each.result for each in lists], RouterPromptAdapters)


def _read(found: pb.PromptAdapter) -> PromptAdapter:
    return PromptAdapter(found.prompt_adapter_id, found.version, found.rows, found.path)
