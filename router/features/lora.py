"""The LoRA adapter that a request names, or whose files it contains."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import msgspec

from router.errors import Reason, RequestError, Violation, Violations, shown
from router.parse.adapter_ids import adapter_not_found, check_id
from router.parse.model import ServedModel, check_model
from router.parse.resume import began_of, changed
from router.peers.adapters import Adapters
from router.peers.offers import Need
from router.peers.peers import EnginePeer
from router.requests.part import Interrupt, Part
from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import MAX_CONFIG_BYTES, Adapter, AdapterFiles
from sluice.wire.errors import ErrorCode, Fault

ID_FIELD, FILES_FIELD = "spec.lora_id", "spec.lora_weights"
UNNAMED = "lora_weights"
"""Id of an uploaded adapter if the request does not name one."""
NO_FILES = Violation(
    FILES_FIELD,
    "is set, but this server accepts no adapters in requests: load the adapter first, then name it in lora_id",
    reason=Reason.NOT_SUPPORTED,
)


@dataclass(frozen=True)
class Lora:
    """Also refuses a name in the field `model` that is neither the served model's nor an adapter's."""

    fields = frozenset({"model", "lora_id", "lora_weights", "resume"})

    _model: ServedModel
    _adapters: Adapters
    _in_requests: bool
    """Whether requests may contain an adapter's files."""

    async def parse(self, message: pb.GenerationSpec, bad: Violations, tenant: str) -> "_Lora | None":
        """Raises RequestError FORBIDDEN, MODEL_NOT_FOUND, ADAPTER_NOT_FOUND, MODEL_CHANGED, or an error of
        `AdapterCatalog.settle`."""
        if message.HasField("lora_weights") and not self._in_requests:
            raise RequestError.invalid([NO_FILES], ErrorCode.FORBIDDEN)
        by_model = message.model if message.model not in ("", self._model.name) else ""
        if message.lora_id or by_model:
            await self._adapters.settle(message.lora_id or by_model, tenant)
        if by_model and self._adapters.find(by_model) is None:
            check_model(by_model, self._model, "spec.model")
        name, adapter_id = _named(message, by_model, self._model, bad)
        # Use the weights with which the stream began, even if the id refers to others now.
        version = began_of(message.resume).adapter
        if not version and (adapter_id or message.HasField("lora_weights")) and _has_begun(message):
            raise changed("the stream began without an adapter")
        if message.HasField("lora_weights"):
            return await self._uploaded(message.lora_weights, adapter_id, version, bad)
        if not adapter_id:
            if version:
                raise changed("the stream began with an adapter: name it in spec.lora_id")
            return None
        return _Lora(self._loaded(name, adapter_id, version), None, self._adapters)

    async def _uploaded(self, weights: pb.LoraWeights, adapter_id: str, version: str, bad: Violations) -> "_Lora":
        files = parse_files(FILES_FIELD, weights, bad)
        # In a thread: hashing 16 MiB, the default limit of a message, would block the event loop for more than 10 ms.
        # The version is cached.
        await asyncio.to_thread(lambda: files.version)
        if version and version != files.version:
            problem = "differ from the weights with which the resumed stream began"
            bad.add(FILES_FIELD, problem, reason=Reason.CONFLICT)
        return _Lora(Adapter(adapter_id or UNNAMED, files.version), files, self._adapters)

    def _loaded(self, name: str, adapter_id: str, version: str) -> Adapter:
        """`name`: field that names the adapter."""
        current = self._adapters.find(adapter_id)
        if version:
            # An engine may still have this version.
            same = current is not None and current.version == version
            return Adapter(adapter_id, version, current.path if current is not None and same else "")
        if current is None:
            raise adapter_not_found(name, adapter_id)
        return current


@dataclass(frozen=True, slots=True)
class _Lora(Part):
    adapter: Adapter
    """Includes the version that the adapter's id referred to when the request arrived."""
    files: AdapterFiles | None
    """The adapter's files, if the request contains them."""
    adapters: Adapters = field(compare=False)

    def needs(self) -> Iterator[Need]:
        which = shown(self.adapter.id)
        description = f"is {which}, but no engine serves adapters: engines need the setting lora"
        refusal = Violation(ID_FIELD, description, private=True)
        yield Need("lora", "", "adapters", which, lambda _: refusal)

    def versions(self) -> Mapping[str, str]:
        return {"adapter": self.adapter.version}

    def during(self, _log: RequestLog, _interrupt: Interrupt) -> AbstractContextManager[None]:
        # Keep the files for later attempts too: engines that do not have them get them from this router.
        return nullcontext() if self.files is None else self.adapters.files.using(self.files)

    def accepted_by(self, engine: EnginePeer) -> bool:
        return not self.adapters.loads.is_supplying(engine, self.adapter.version)

    def submitted(self, _: RequestLog) -> dict[str, Any]:
        return {"adapter": self.adapter}

    def supply(self, engine: EnginePeer) -> bool:
        return self.adapters.loads.supply(engine, self.adapter.version)

    def named(self, fault: Fault) -> Fault:
        # Engines do not distinguish an uploaded adapter from others.
        uploaded = fault.field == ID_FIELD and self.files is not None
        return msgspec.structs.replace(fault, field=FILES_FIELD) if uploaded else fault


def parse_files(field: str, message: pb.LoraWeights, bad: Violations) -> AdapterFiles:
    """The files in `message`. Their contents are checked by the engines."""
    bad.at_most(f"{field}.config_json", len(message.config_json), MAX_CONFIG_BYTES, "bytes")
    for name in ("config_json", "safetensors"):
        if not getattr(message, name):
            bad.add(f"{field}.{name}", "is empty", reason=Reason.MISSING)
    return AdapterFiles(message.config_json, message.safetensors)


def _has_begun(spec: pb.GenerationSpec) -> bool:
    """Whether the request resumes tokens and says with which model they were generated."""
    return any(part.token_ids for part in spec.resume) and any(part.model_fingerprint for part in spec.resume)


def _named(spec: pb.GenerationSpec, by_model: str, model: ServedModel, bad: Violations) -> tuple[str, str]:
    """(the field that names an adapter, the adapter's id); the id is empty if neither field names one. `by_model`: the
    name in the field `model`, if it is not the model's."""
    if spec.lora_id:
        check_id(ID_FIELD, spec.lora_id, model, bad)
        if by_model not in ("", spec.lora_id):
            problem = f"is {shown(spec.lora_id)}, but spec.model names another adapter, {shown(by_model)}"
            bad.add(ID_FIELD, problem, private=True, reason=Reason.CONFLICT)
        return ID_FIELD, spec.lora_id
    return "spec.model", by_model
