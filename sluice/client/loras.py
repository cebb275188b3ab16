"""LoRA adapters of each router (ModelService.LoadLora, UploadLora, UnloadLora and ListLoras)."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TypedDict

import grpc
from grpc import aio

from sluice.checkpoint.peft import CONFIG, WEIGHTS
from sluice.client.each_router import AdapterCatalog
from sluice.client.errors import SluiceError
from sluice.v1 import admin_pb2 as pb

MAX_CONFIG_BYTES = 1 << 20
PART_BYTES = 1 << 20
"""Bytes in one message of an upload, which limits what the client holds in memory."""
UPLOAD_TRIES = 3
"""Times that an upload is tried; see `is_cut_short`."""

Folder = str | PathLike[str]


@dataclass(frozen=True, slots=True)
class Lora:
    """A loaded LoRA adapter."""

    lora_id: str
    version: str
    """Hash of the files. It changes when other weights are loaded under the same id."""
    rank: int
    path: str = ""
    """Folder on the engines' machines; empty: the files were uploaded."""


@dataclass(frozen=True, slots=True)
class RouterLoras:
    """The LoRA adapters of one router, or its error."""

    address: str
    loras: tuple[Lora, ...] = ()
    """From `load_lora` the loaded adapter, from `list_loras` all adapters by id; empty with an error."""
    error: SluiceError | None = None
    """Why the router's call failed."""


class LoraWeights(TypedDict):
    """The contents of an adapter's two files, for the option `lora_weights`. See sluice.v1.LoraWeights."""

    config_json: bytes
    safetensors: bytes


def read_lora(folder: Folder) -> LoraWeights:
    """Read an adapter that peft saved, for the option `lora_weights`. Raises OSError, ValueError."""
    adapter = AdapterFolder(folder)
    return LoraWeights(config_json=adapter.config_json, safetensors=adapter.weights.read_bytes())


class AdapterFolder:
    """The files of an adapter that peft saved.

    Raises OSError if a file is missing or unreadable, ValueError if the configuration is too large.
    """

    def __init__(self, folder: Folder) -> None:
        path = Path(folder)
        self.weights = path / WEIGHTS
        # Both files are opened before anything is sent, because gRPC would hide the error of a missing file.
        with self.weights.open("rb"), (path / CONFIG).open("rb") as config:
            self.config_json = config.read(MAX_CONFIG_BYTES + 1)
        if len(self.config_json) > MAX_CONFIG_BYTES:
            raise ValueError(f"{path / CONFIG} has more than {MAX_CONFIG_BYTES} bytes, which is the limit")


class Upload:
    """The messages of one UploadLora call. Each try iterates over them."""

    def __init__(self, lora_id: str, folder: AdapterFolder, model: str) -> None:
        self.error: OSError | None = None
        """Why the file could not be read to its end, which gRPC does not report."""
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
        # In a thread, so that a slow disk does not block the event loop.
        while (part := await asyncio.to_thread(next, parts, None)) is not None:
            yield part


def is_cut_short(request: object, error: BaseException) -> bool:
    """Whether the router answered an upload before its end, with an error that is lost.

    In its place, grpc.aio reports only that a write failed.
    """
    return (
        isinstance(request, Upload)
        and isinstance(error, aio.AioRpcError)
        and (error.code(), error.details()) == (grpc.StatusCode.INTERNAL, "Internal error from Core")
    )


def load_request(lora_id: str, path: str, model: str) -> pb.LoadLoraRequest:
    return pb.LoadLoraRequest(lora_id=lora_id, path=path, model=model)


def check_source(path: str | None, folder: Folder | None) -> None:
    """Raises TypeError unless exactly one is given."""
    if (path is None) == (folder is None):
        raise TypeError("give either path, a folder on the engines' machines, or folder, a folder on this machine")


def raise_read_error(uploads: Sequence[Upload]) -> None:
    """Raises the OSError of the first upload whose file could not be read."""
    for upload in uploads:
        if upload.error is not None:
            raise upload.error


def _read(lora: pb.Lora) -> Lora:
    return Lora(lora.lora_id, lora.version, lora.rank, lora.path)


LORAS = AdapterCatalog(RouterLoras, "lora", "loras", _read, pb.ListLorasRequest)
