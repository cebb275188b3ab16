"""The LoRA adapter that a request names, or whose files it contains."""

import re
from collections.abc import Callable

from router.errors import Reason, RequestError, Violation, Violations, shown
from router.parse.model import ServedModel
from router.parse.needs import Need
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import ADAPTER_ID, MAX_CONFIG_BYTES, MAX_ID_CHARS, VERSION_BYTES, Adapter, AdapterFiles
from sluice.wire.errors import ErrorCode

VERSION = re.compile(rf"[0-9a-f]{{{2 * VERSION_BYTES}}}", re.ASCII)
UNNAMED = "lora_weights"
"""Id of an uploaded adapter if the request does not name one."""


Find = Callable[[str], Adapter | None]
"""Looks up a loaded adapter by id."""


def parse_adapter(
    spec: pb.GenerationSpec,
    model: ServedModel,
    find: Find,
    version: str,
    bad: Violations,
    hashed: AdapterFiles | None = None,
) -> tuple[Adapter | None, AdapterFiles | None]:
    """The adapter, and its files if the request contains them.

    `version`: version with which the resumed stream began; empty for any. `hashed`: the files in the request, if their
    version was computed already. Raises RequestError ADAPTER_NOT_FOUND, MODEL_CHANGED.
    """
    field, adapter_id = _named(spec, model, bad)
    if not version and (adapter_id or spec.HasField("lora_weights")) and _has_begun(spec):
        raise changed("the stream began without an adapter")
    if spec.HasField("lora_weights"):
        _check_files("spec.lora_weights", spec.lora_weights, bad)
        files = files_of(spec.lora_weights) if hashed is None else hashed
        uploaded = Adapter(adapter_id or UNNAMED, files.version)
        if version and version != uploaded.version:
            problem = "differ from the weights with which the resumed stream began"
            bad.add("spec.lora_weights", problem, reason=Reason.CONFLICT)
        return uploaded, files
    if not adapter_id:
        if version:
            raise changed("the stream began with an adapter: name it in spec.lora_id")
        return None, None
    current = find(adapter_id)
    if version:
        # Use the weights with which the stream began, even if the id refers to others now: an engine may still have
        # them.
        same = current is not None and current.version == version
        return Adapter(adapter_id, version, current.path if current is not None and same else ""), None
    if current is None:
        raise adapter_not_found(field, adapter_id)
    return current, None


def adapter_need(adapter: Adapter) -> Need:
    description = f"is {shown(adapter.id)}, but no engine serves adapters: engines need the setting lora"
    refusal = Violation("spec.lora_id", description, private=True)
    return Need("lora", "", "adapters", shown(adapter.id), lambda _: refusal)


def check_id(field: str, adapter_id: str, model: ServedModel, bad: Violations) -> None:
    if check_form(field, adapter_id, bad) and adapter_id == model.name:
        bad.add(field, f"is {shown(adapter_id)}, the name of the model", reason=Reason.CONFLICT)


def check_form(field: str, adapter_id: str, bad: Violations) -> bool:
    """Whether the text may be the id of an adapter of any kind. Adds a violation if not."""
    if ADAPTER_ID.fullmatch(adapter_id):
        return True
    bad.add(
        field,
        f"is {shown(adapter_id)}, must be 1 to {MAX_ID_CHARS} characters of [A-Za-z0-9._:/-]",
        private=True,
        reason=Reason.INVALID_FORMAT,
    )
    return False


def parse_files(field: str, message: pb.LoraWeights, bad: Violations) -> AdapterFiles:
    """The files in `message`. Their contents are checked by the engines."""
    _check_files(field, message, bad)
    return files_of(message)


def files_of(message: pb.LoraWeights) -> AdapterFiles:
    return AdapterFiles(message.config_json, message.safetensors)


def _check_files(field: str, message: pb.LoraWeights, bad: Violations) -> None:
    bad.at_most(f"{field}.config_json", len(message.config_json), MAX_CONFIG_BYTES, "bytes")
    for name in ("config_json", "safetensors"):
        if not getattr(message, name):
            bad.add(f"{field}.{name}", "is empty", reason=Reason.MISSING)


def changed(message: str) -> RequestError:
    return RequestError(ErrorCode.MODEL_CHANGED, message)


def adapter_not_found(field: str, adapter_id: str) -> RequestError:
    violation = Violation(
        field, f"is {shown(adapter_id)}; no adapter is loaded under this id", private=True, reason=Reason.UNKNOWN_VALUE
    )
    return RequestError.invalid([violation], ErrorCode.ADAPTER_NOT_FOUND)


def _has_begun(spec: pb.GenerationSpec) -> bool:
    """Whether the request resumes tokens and says with which model they were generated."""
    return any(part.token_ids for part in spec.resume) and any(part.model_fingerprint for part in spec.resume)


def _named(spec: pb.GenerationSpec, model: ServedModel, bad: Violations) -> tuple[str, str]:
    """(the field that names an adapter, the adapter's id); the id is empty if neither field names one."""
    by_model = spec.model if spec.model not in ("", model.name) else ""
    if spec.lora_id:
        check_id("spec.lora_id", spec.lora_id, model, bad)
        if by_model not in ("", spec.lora_id):
            problem = f"is {shown(spec.lora_id)}, but spec.model names another adapter, {shown(by_model)}"
            bad.add("spec.lora_id", problem, private=True, reason=Reason.CONFLICT)
        return "spec.lora_id", spec.lora_id
    return "spec.model", by_model
