"""The calls for LoRA and prompt adapters of the fake server."""
# ruff: noqa: N802

import hashlib
from collections.abc import Iterator
from typing import Any

import grpc

from sluice.v1 import admin_pb2
from tests.fakes.failures import Failure, adapter_not_found
from tests.fakes.server_script import Script


class AdapterCalls:
    """Loads, lists and unloads the adapters of a script."""

    script: Script

    def LoadLora(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        lora = self._add_lora(admin_pb2.Lora(lora_id=request.lora_id, path=request.path, rank=8, version="1"), context)
        return admin_pb2.LoadLoraResponse(lora=lora)

    def UploadLora(self, requests: Iterator[Any], context: Any) -> Any:
        header = next(requests).header
        self._record(header, context)
        digest, parts = hashlib.sha256(header.config_json), self.script.uploads.setdefault(header.lora_id, [])
        parts[:] = [header.config_json]
        size = 0
        for request in requests:
            size += len(request.data)
            digest.update(request.data)
            if self.script.keeps_uploads:
                parts.append(request.data)
        # The iterator of a call that was cancelled ends like that of a complete one.
        if not size:
            Failure(grpc.StatusCode.INVALID_ARGUMENT, "no weights").abort(context)
        lora = self._add_lora(admin_pb2.Lora(lora_id=header.lora_id, rank=8, version=digest.hexdigest()), context)
        return admin_pb2.UploadLoraResponse(lora=lora)

    def _add_lora(self, lora: Any, context: Any) -> Any:
        loras = self.script.loras
        if lora.lora_id not in loras and len(loras) >= self.script.max_loras:
            Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many adapters").abort(context)
        loras[lora.lora_id] = lora
        return lora

    def _check_lora(self, lora_id: str, context: Any) -> None:
        if lora_id and self.script.checks_loras and lora_id not in self.script.loras:
            adapter_not_found(lora_id).abort(context)

    def _check_prompt_adapter(self, name: str, context: Any) -> None:
        if name and self.script.checks_loras and name not in self.script.prompt_adapters:
            adapter_not_found(name, "prompt_adapter_id").abort(context)

    def UnloadLora(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        if self.script.loras.pop(request.lora_id, None) is None:
            adapter_not_found(request.lora_id).abort(context)
        return admin_pb2.UnloadLoraResponse()

    def ListLoras(self, request: Any, context: Any) -> Any:
        """In pages of two."""
        self._record(request, context)
        rest = [lora for lora_id, lora in sorted(self.script.loras.items()) if lora_id > request.page_token]
        token = rest[1].lora_id if len(rest) > 2 else ""
        return admin_pb2.ListLorasResponse(loras=rest[:2], next_page_token=token)

    def LoadPromptAdapter(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        name = request.prompt_adapter_id
        if name not in self.script.prompt_adapters and len(self.script.prompt_adapters) >= self.script.max_loras:
            Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many prompt adapters").abort(context)
        adapter = admin_pb2.PromptAdapter(prompt_adapter_id=name, path=request.path, rows=8, version="1")
        self.script.prompt_adapters[name] = adapter
        return admin_pb2.LoadPromptAdapterResponse(prompt_adapter=adapter)

    def UnloadPromptAdapter(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        if self.script.prompt_adapters.pop(request.prompt_adapter_id, None) is None:
            adapter_not_found(request.prompt_adapter_id, "prompt_adapter_id").abort(context)
        return admin_pb2.UnloadPromptAdapterResponse()

    def ListPromptAdapters(self, request: Any, context: Any) -> Any:
        """In pages of two."""
        self._record(request, context)
        adapters = sorted(self.script.prompt_adapters.items())
        rest = [adapter for name, adapter in adapters if name > request.page_token]
        token = rest[1].prompt_adapter_id if len(rest) > 2 else ""
        return admin_pb2.ListPromptAdaptersResponse(prompt_adapters=rest[:2], next_page_token=token)
