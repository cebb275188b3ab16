"""Adapters of each router: LoRA adapters and prompt adapters, which ModelService loads, unloads and lists."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Generic, TypedDict, TypeVar

import grpc
from grpc import aio

from sluice.checkpoint.peft import CONFIG, WEIGHTS
from sluice.client.connection import Method, Router
from sluice.client.errors import AdapterNotFound, SluiceError
from sluice.client.values import embeddings_of
from sluice.v1 import admin_pb2 as pb
from sluice.v1 import generation_pb2

MAX_CONFIG_BYTES = 1 << 20
PART_BYTES = 1 << 20
"""Bytes in one message of an upload, which limits what the client holds in memory."""
UPLOAD_TRIES = 3
"""Maximum number of tries of an upload; see `is_cut_short`."""
PAGE_SIZE = 1000

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


def check_lora_source(path: str | None, folder: Folder | None) -> None:
    """Raises TypeError unless exactly one is given."""
    if (path is None) == (folder is None):
        raise TypeError("give either path, a folder on the engines' machines, or folder, a folder on this machine")


def raise_read_error(uploads: Sequence[Upload]) -> None:
    """Raises the OSError of the first upload whose file could not be read."""
    for upload in uploads:
        if upload.error is not None:
            raise upload.error


def prompt_adapter_request(
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


class Lists:
    """The pages of a list call that each router has returned so far."""

    def __init__(
        self, routers: Sequence[Router], request: Callable[..., Any], read: Callable[[Any], Iterable[Any]]
    ) -> None:
        """`request`: class of the request message. `read`: returns the items of a response."""
        self._request, self._read = request, read
        self._lists: dict[Router, Any] = dict.fromkeys(routers, ())
        self._tokens = dict.fromkeys(routers, "")
        """Token of the next page of each list that is incomplete."""

    def next_calls(self) -> list[tuple[Router, Any]]:
        """A request for the next page of each incomplete list; none if all are complete."""
        return [(each, self._request(page_size=PAGE_SIZE, page_token=token)) for each, token in self._tokens.items()]

    def add(self, answers: Sequence[Any]) -> None:
        """Add the response to each of the next calls, or the error that it ended with."""
        for router, answer in zip(self._tokens, answers, strict=True):
            if isinstance(answer, BaseException):
                self._lists[router], self._tokens[router] = answer, ""
            else:
                self._lists[router] += tuple(self._read(answer))
                self._tokens[router] = answer.next_page_token
        self._tokens = {router: token for router, token in self._tokens.items() if token}

    def results(self) -> list[Any]:
        """For each router, the items of all pages, or an error."""
        return list(self._lists.values())


T = TypeVar("T")
"""What a call returns for each router."""


@dataclass(frozen=True)
class AdapterCatalog(Generic[T]):
    """The calls about one kind of adapters. Methods raise the first error if every router failed."""

    name: str
    """Field of a response that holds one adapter. With an "s": the field for several, in responses and `of_router`."""
    of_router: Callable[..., T]
    """Class of the result of one router."""
    adapter: type[Lora | PromptAdapter]
    """Class of an adapter. Its fields are named like those of the message."""
    unload_method: Method
    unload_request: Callable[..., Any]
    """Class of the request message. Its field `name`_id holds the adapter's id."""
    list_method: Method
    list_request: Callable[..., Any]

    def loaded(self, addresses: Sequence[str], answers: Sequence[Any]) -> list[T]:
        """Read answers of calls that load an adapter, or errors."""
        return self._each(
            addresses, [_failed(answer) or (self._read(getattr(answer, self.name)),) for answer in answers]
        )

    def unloaded(self, addresses: Sequence[str], answers: Sequence[Any]) -> list[T]:
        """Read answers of calls that unload an adapter, or errors."""
        results = [_failed(answer) or () for answer in answers]
        if () in results:
            # Routers pass changes on to each other, so a router may have unloaded the adapter before our call arrived.
            results = [() if isinstance(result, AdapterNotFound) else result for result in results]
        return self._each(addresses, results)

    def lists(self, routers: Sequence[Router]) -> Lists:
        """The lists of all routers, still empty."""
        return Lists(routers, self.list_request, lambda answer: map(self._read, getattr(answer, f"{self.name}s")))

    def listed(self, addresses: Sequence[str], lists: Lists) -> list[T]:
        """Read the complete lists of all routers."""
        return self._each(addresses, lists.results())

    def _read(self, message: Any) -> Lora | PromptAdapter:
        return self.adapter(**{field.name: getattr(message, field.name) for field in fields(self.adapter)})

    def _each(self, addresses: Sequence[str], results: Sequence[Any]) -> list[T]:
        """`results`: for each router, a tuple of adapters or an error."""
        errors = [result for result in results if isinstance(result, BaseException)]
        for error in errors:
            # An exception of another type is a defect of this program.
            if not isinstance(error, SluiceError) or len(errors) == len(results):
                raise error
        return [
            self.of_router(address, **{"error" if isinstance(result, SluiceError) else f"{self.name}s": result})
            for address, result in zip(addresses, results, strict=True)
        ]


def _failed(answer: Any) -> BaseException | None:
    """The answer, if it is an error."""
    return answer if isinstance(answer, BaseException) else None


LORAS = AdapterCatalog(
    "lora",
    RouterLoras,
    Lora,
    unload_method=lambda router: router.models.UnloadLora,
    unload_request=pb.UnloadLoraRequest,
    list_method=lambda router: router.models.ListLoras,
    list_request=pb.ListLorasRequest,
)
PROMPT_ADAPTERS = AdapterCatalog(
    "prompt_adapter",
    RouterPromptAdapters,
    PromptAdapter,
    unload_method=lambda router: router.models.UnloadPromptAdapter,
    unload_request=pb.UnloadPromptAdapterRequest,
    list_method=lambda router: router.models.ListPromptAdapters,
    list_request=pb.ListPromptAdaptersRequest,
)
