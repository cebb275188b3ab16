"""LoRA adapters, router by router (ModelService.LoadLora, UploadLora, UnloadLora and ListLoras)."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, TypedDict

import grpc
from grpc import aio

from sluice.client.connection import Router
from sluice.client.each_router import Listing, each_result, failed, of_unloads
from sluice.client.errors import SluiceError
from sluice.v1 import admin_pb2 as pb

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MAX_CONFIG_BYTES = 1 << 20
PART_BYTES = 1 << 20
"""Of an upload: what a client holds in memory of a file."""
UPLOADS = 3
"""Times that an upload is tried; see `is_cut_short`."""

Folder = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Lora:
    """A loaded adapter."""

    lora_id: str
    version: str
    """Hash of its files: the same id loaded again with other weights has another one."""
    rank: int
    path: str = ""
    """On the engines' machines; empty: its files were uploaded."""


@dataclass(frozen=True, slots=True)
class RouterLoras:
    """Of one router."""

    address: str
    loras: tuple[Lora, ...] = ()
    """After `load_lora` the new one, after `list_loras` all, by id; empty with an error."""
    error: SluiceError | None = None
    """Why the router did not answer, or did not do it."""


class LoraWeights(TypedDict):
    """The two files of an adapter: the option `lora_weights`. See sluice.v1.LoraWeights."""

    config_json: bytes
    safetensors: bytes


def read_lora(folder: Folder) -> LoraWeights:
    """An adapter that peft saved, for the option `lora_weights`. Raises OSError, ValueError."""
    found = AdapterFolder(folder)
    return LoraWeights(config_json=found.config_json, safetensors=found.weights.read_bytes())


class AdapterFolder:
    """Raises OSError if a file is missing or cannot be read, ValueError for a configuration that is too large."""

    def __init__(self, folder: Folder) -> None:
        path = Path(folder)
        self.weights = path / WEIGHTS
        # Before anything is sent: gRPC would hide the error of a file that is missing.
        with self.weights.open("rb"), (path / CONFIG).open("rb") as config:
            self.config_json = config.read(MAX_CONFIG_BYTES + 1)
        if len(self.config_json) > MAX_CONFIG_BYTES:
            raise ValueError(f"{path / CONFIG} has more than {MAX_CONFIG_BYTES} bytes, the most that are sent")


class Upload:
    """The messages of one UploadLora call; iterate over it once."""

    def __init__(self, lora_id: str, folder: AdapterFolder, model: str) -> None:
        self.error: OSError | None = None
        """Why the file could not be read to its end: gRPC reports that as the end of the call alone."""
        header = pb.UploadLoraHeader(lora_id=lora_id, model=model, config_json=folder.config_json)
        self._header = pb.UploadLoraRequest(header=header)
        self._weights = folder.weights

    def __iter__(self) -> Iterator[pb.UploadLoraRequest]:
        yield self._header
        try:
            with self._weights.open("rb") as file:
                while data := file.read(PART_BYTES):
                    yield pb.UploadLoraRequest(data=data)
        except OSError as error:
            self.error = error
            raise

    async def __aiter__(self) -> AsyncIterator[pb.UploadLoraRequest]:
        parts = iter(self)
        # In a thread: a disk may be slow, and the loop has other calls.
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            yield part


def is_cut_short(request: object, error: BaseException) -> bool:
    """Whether the router has answered an upload before its end, with an error that gRPC replaced by one of its own: it
    reports a write that failed, not why."""
    return (
        isinstance(request, Upload)
        and isinstance(error, aio.AioRpcError)
        and (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "Internal error from Core")
    )


def listing(router: Router) -> Listing:
    return Listing(router, pb.ListLorasRequest, lambda answer: [_read(each) for each in answer.loras])


def load_request(lora_id: str, path: str, model: str) -> pb.LoadLoraRequest:
    return pb.LoadLoraRequest(lora_id=lora_id, path=path, model=model)


def check_source(path: str | None, folder: Folder | None) -> None:
    """Raises TypeError unless it is exactly one."""
    if (path is None) == (folder is None):
        raise TypeError("give either path, a folder on the engines' machines, or folder, one on this machine")


def read_loaded(addresses: Sequence[str], answers: Sequence[Any]) -> list[RouterLoras]:
    """Of LoadLora or UploadLora, or errors. Raises the first error if no router loaded it."""
    return each_result(addresses, [failed(each) or (_read(each.lora),) for each in answers], RouterLoras)


def read_unloaded(addresses: Sequence[str], answers: Sequence[Any]) -> list[RouterLoras]:
    """Of UnloadLora, or errors. Raises the first error if no router unloaded it."""
    return each_result(addresses, of_unloads(answers), RouterLoras)


def read_lists(addresses: Sequence[str], lists: Sequence[Listing]) -> list[RouterLoras]:
    """Raises the first error if no router answered."""
    return each_result(addresses, [each.result for each in lists], RouterLoras)


def raise_read_error(uploads: Sequence[Upload]) -> None:
    """Raises OSError."""
    for upload in uploads:
        if upload.error is not None:
            raise upload.error


def _read(lora: pb.Lora) -> Lora:
    return Lora(lora.lora_id, lora.version, lora.rank, lora.path)
