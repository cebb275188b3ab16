"""sluice.v1.ModelService: the served model, its LoRA adapters and its prompt adapters."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from router.api.paging import page_of
from router.api.prompt_adapters import PromptAdapterLoader
from router.api.rpc import Context
from router.errors import Reason, RequestError, Violations
from router.features.lora import parse_files
from router.parse.adapter_ids import adapter_not_found, check_id
from router.parse.model import ServedModel, check_model
from router.peers.adapter_catalog import AdapterCatalog
from router.peers.adapters import Adapters
from router.peers.offers import Offers
from router.peers.prompt_adapters import PromptAdapters
from sluice.v1 import admin_pb2 as pb
from sluice.v1.sampling_pb2 import SamplingParams
from sluice.wire.adapters import MAX_CONFIG_BYTES, MAX_FILE_BYTES, AdapterEntry, AdapterFiles
from sluice.wire.errors import ErrorCode
from sluice.wire.offers import LORA
from sluice.wire.params import DEFAULT_NAMES

MAX_UPLOADS = 4
"""Concurrent uploads: each may take twice its size in memory."""
UPLOAD_SECONDS = 600.0
"""Timeout for receiving all parts of an upload. A stalled upload occupies its slot for this long."""
MAX_LOADS = 32
"""Concurrent loads, including uploads: engines keep a limited number of answers."""


@dataclass(frozen=True)
class ModelService:
    _model: ServedModel
    _offers: Offers
    _adapters: Adapters
    _prompt_adapters: PromptAdapters
    _prompt_adapter_loader: PromptAdapterLoader
    _uploads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UPLOADS))
    _loads: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_LOADS))

    def models(self) -> list[pb.Model]:
        return [self._describe()]

    async def list_models(self, message: pb.ListModelsRequest, _: Context) -> pb.ListModelsResponse:
        """Raises RequestError."""
        page, token = page_of(self.models(), lambda model: model.name, message)
        return pb.ListModelsResponse(models=page, next_page_token=token)

    async def get_model_info(self, message: pb.GetModelInfoRequest, _: Context) -> pb.GetModelInfoResponse:
        check_model(message.model, self._model, "model")
        return pb.GetModelInfoResponse(model=self._describe())

    async def load_lora(self, message: pb.LoadLoraRequest, context: Context) -> pb.LoadLoraResponse:
        """Raises RequestError."""
        _check_admin(context)
        bad = self._check(message.lora_id, message.model)
        if message.WhichOneof("source") == "weights":
            files = parse_files("weights", message.weights, bad)
            bad.raise_if_any()
            async with _slot(self._loads, MAX_LOADS, "loads"):
                entry = await self._adapters.load_files(message.lora_id, "weights", files)
        else:
            if not message.path:
                bad.add("path", "is empty, and weights is not set", reason=Reason.MISSING)
            bad.at_most("path", len(message.path), 1024, "characters")
            bad.raise_if_any()
            async with _slot(self._loads, MAX_LOADS, "loads"):
                entry = await self._adapters.load_path(message.lora_id, message.path)
        return pb.LoadLoraResponse(lora=_lora(entry))

    async def upload_lora(self, messages: AsyncIterator[Any], context: Context) -> pb.UploadLoraResponse:
        """Raises RequestError."""
        _check_admin(context)
        async with _slot(self._uploads, MAX_UPLOADS, "uploads"):
            try:
                async with asyncio.timeout(UPLOAD_SECONDS):
                    adapter_id, files = await self._receive(messages)
            except TimeoutError:
                message = f"the upload was not complete within {UPLOAD_SECONDS:g} s"
                raise RequestError(ErrorCode.SLOW_CLIENT, message) from None
            async with _slot(self._loads, MAX_LOADS, "loads"):
                entry = await self._adapters.load_files(adapter_id, "data", files)
        return pb.UploadLoraResponse(lora=_lora(entry))

    async def _receive(self, messages: AsyncIterator[Any]) -> tuple[str, AdapterFiles]:
        """The adapter's id and its files. Raises RequestError INVALID_ARGUMENT."""
        header: pb.UploadLoraHeader | None = None
        weights = bytearray()
        async for message in messages:
            kind = message.WhichOneof("part")
            if (header is None) is not (kind == "header"):
                raise RequestError.at(
                    "part", "must be the header first, and data after it", reason=Reason.INVALID_FORMAT
                )
            if header is None:
                header = message.header
                bad = self._check(header.lora_id, header.model, "header.")
                bad.at_most("header.config_json", len(header.config_json), MAX_CONFIG_BYTES, "bytes")
                bad.raise_if_any()
                continue
            weights += message.data
            if len(weights) > MAX_FILE_BYTES:
                problem = f"all parts together exceed {MAX_FILE_BYTES} bytes, the limit"
                raise RequestError.at("data", problem, reason=Reason.TOO_MANY)
        if header is None or not weights or not header.config_json:
            raise RequestError.at(
                "part", "must have a header with config_json, then data", reason=Reason.INVALID_FORMAT
            )
        return header.lora_id, AdapterFiles(header.config_json, bytes(weights))

    async def unload_lora(self, message: pb.UnloadLoraRequest, context: Context) -> pb.UnloadLoraResponse:
        """Raises RequestError."""
        _unload(self._adapters, "lora_id", message.lora_id, context)
        return pb.UnloadLoraResponse()

    async def list_loras(self, message: pb.ListLorasRequest, _: Context) -> pb.ListLorasResponse:
        """Raises RequestError."""
        page, token = page_of(self._adapters.loaded(), lambda entry: entry.id, message)
        return pb.ListLorasResponse(loras=map(_lora, page), next_page_token=token)

    async def load_prompt_adapter(
        self, message: pb.LoadPromptAdapterRequest, context: Context
    ) -> pb.LoadPromptAdapterResponse:
        """Raises RequestError."""
        _check_admin(context)
        entry = await self._prompt_adapter_loader.load(message)
        return pb.LoadPromptAdapterResponse(prompt_adapter=_prompt_adapter(entry))

    async def unload_prompt_adapter(
        self, message: pb.UnloadPromptAdapterRequest, context: Context
    ) -> pb.UnloadPromptAdapterResponse:
        """Raises RequestError."""
        _unload(self._prompt_adapters, "prompt_adapter_id", message.prompt_adapter_id, context)
        return pb.UnloadPromptAdapterResponse()

    async def list_prompt_adapters(
        self, message: pb.ListPromptAdaptersRequest, _: Context
    ) -> pb.ListPromptAdaptersResponse:
        """Raises RequestError."""
        page, token = page_of(self._prompt_adapters.loaded(), lambda entry: entry.id, message)
        return pb.ListPromptAdaptersResponse(prompt_adapters=map(_prompt_adapter, page), next_page_token=token)

    def _check(self, adapter_id: str, model: str, prefix: str = "") -> Violations:
        check_model(model, self._model, f"{prefix}model")
        bad = Violations()
        check_id(f"{prefix}lora_id", adapter_id, self._model, bad)
        return bad

    def _describe(self) -> pb.Model:
        model = self._model
        image_tokens = max(self._offers.sizes("image_rows"), default=0)
        capabilities = {
            "chat": model.has_chat,
            "lora": LORA in (self._offers.known or ()),
            "images": image_tokens > 0,
        }
        return pb.Model(
            name=model.name,
            max_context_tokens=self._offers.context_tokens,
            vocab_size=model.vocab_size,
            dtype=model.dtype,
            capabilities=[name for name, supported in capabilities.items() if supported],
            eos_token_ids=model.eos_token_ids,
            tokenizer_fingerprint=model.tokenizer_fingerprint,
            tensors=self._offers.values("tensor"),
            logits_processors=self._offers.values("logits_processor"),
            hidden_size=max(self._offers.sizes("prompt_rows"), default=0),
            image_tokens=image_tokens,
            default_sampling=SamplingParams(**{name: getattr(model.sampling, name) for name in DEFAULT_NAMES}),
        )


@asynccontextmanager
async def _slot(slots: asyncio.Semaphore, limit: int, what: str) -> AsyncIterator[None]:
    """Occupies one of the slots. Raises RequestError OVERLOADED if all are taken."""
    if slots.locked():
        raise RequestError(ErrorCode.OVERLOADED, f"{limit} {what} of adapters are in progress: try again later")
    async with slots:
        yield


def _check_admin(context: Context) -> None:
    # An adapter changes the output of every caller that uses its id.
    if not context.caller.admin:
        raise RequestError(ErrorCode.FORBIDDEN, "loading and unloading adapters needs a token that is marked admin")


def _unload(adapters: AdapterCatalog, field: str, adapter_id: str, context: Context) -> None:
    _check_admin(context)
    if not adapters.unload(adapter_id):
        raise adapter_not_found(field, adapter_id)


def _lora(entry: AdapterEntry) -> pb.Lora:
    return pb.Lora(lora_id=entry.id, path=entry.path, rank=entry.size, version=entry.version)


def _prompt_adapter(entry: AdapterEntry) -> pb.PromptAdapter:
    return pb.PromptAdapter(prompt_adapter_id=entry.id, path=entry.path, rows=entry.size, version=entry.version)
