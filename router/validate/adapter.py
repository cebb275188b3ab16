"""Which LoRA adapter a request names, or brings."""

import re
from collections.abc import Callable
from typing import NamedTuple

from router.errors import Reason, RequestError, Violation, Violations, shown
from router.validate.model import Model
from sluice.ring.adapters import ADAPTER_ID, MAX_CONFIG_BYTES, MAX_ID_CHARS, VERSION_BYTES, Adapter, AdapterFiles
from sluice.ring.errors import ErrorCode
from sluice.v1 import generation_pb2 as pb

VERSION = re.compile(rf"[0-9a-f]{{{2 * VERSION_BYTES}}}", re.ASCII)
SEPARATOR = "."
"""Between the model's fingerprint and the adapter's version, in what `Started` returns."""
TABLE_SEPARATOR = "+"
"""Before the version of the prompt adapter."""
UNNAMED = "lora_weights"
"""Id of an adapter that a request brings without one."""


class Began(NamedTuple):
    """What a stream began with, that a request resumes; each part is empty if there was none, or if it is unknown."""

    model: str = ""
    """Its fingerprint."""
    adapter: str = ""
    """Version of the LoRA adapter."""
    table: str = ""
    """Version of the prompt adapter."""


Find = Callable[[str], Adapter | None]
"""By id."""


def parse_adapter(
    spec: pb.GenerationSpec, model: Model, find: Find, version: str, bad: Violations
) -> tuple[Adapter | None, AdapterFiles | None]:
    """The adapter, and its files if the request brings them. `version`: of the stream that it resumes; empty: any.

    Raises RequestError ADAPTER_NOT_FOUND, MODEL_CHANGED.
    """
    field, adapter_id = _named(spec, model, bad)
    if not version and (adapter_id or spec.HasField("lora_weights")) and _has_begun(spec):
        raise changed("the stream began without an adapter")
    if spec.HasField("lora_weights"):
        files = parse_files("spec.lora_weights", spec.lora_weights, bad)
        found = Adapter(adapter_id or UNNAMED, files.version)
        if version and version != found.version:
            bad.add("spec.lora_weights", "are not those with which the resumed stream began", reason=Reason.CONFLICT)
        return found, files
    if not adapter_id:
        if version:
            raise changed("the stream began with an adapter: name it in spec.lora_id")
        return None, None
    current = find(adapter_id)
    if version:
        # The weights of its beginning, whatever the id stands for now: an engine may still have them.
        same = current is not None and current.version == version
        return Adapter(adapter_id, version, current.path if current is not None and same else ""), None
    if current is None:
        raise adapter_not_found(field, adapter_id)
    return current, None


def check_adapter(adapter: Adapter | None, known: bool | None) -> None:
    """Raises RequestError if no engine serves adapters. `known`: whether one does; None: no engine has said it."""
    if adapter is not None and known is False:
        description = f"is {shown(adapter.id)}, but no engine serves adapters: they need the setting lora"
        raise RequestError.invalid([Violation("spec.lora_id", description, private=True)])


def check_id(field: str, adapter_id: str, model: Model, bad: Violations) -> None:
    if check_form(field, adapter_id, bad) and adapter_id == model.name:
        bad.add(field, f"is {shown(adapter_id)}, the name of the model", reason=Reason.CONFLICT)


def check_form(field: str, adapter_id: str, bad: Violations) -> bool:
    """Whether it may be the id of an adapter of any kind."""
    if ADAPTER_ID.fullmatch(adapter_id):
        return True
    bad.add(
        field,
        f"is {shown(adapter_id)}, must be 1 to {MAX_ID_CHARS} of [A-Za-z0-9._:/-]",
        private=True,
        reason=Reason.INVALID_FORMAT,
    )
    return False


def parse_files(field: str, message: pb.LoraWeights, bad: Violations) -> AdapterFiles:
    """What is in them is the engines' to check."""
    bad.at_most(f"{field}.config_json", len(message.config_json), MAX_CONFIG_BYTES, "bytes")
    for name in ("config_json", "safetensors"):
        if not getattr(message, name):
            bad.add(f"{field}.{name}", "is empty", reason=Reason.MISSING)
    return AdapterFiles(message.config_json, message.safetensors)


def split_fingerprint(text: str) -> Began:
    """From `Started.model_fingerprint`."""
    both, _, table = text.partition(TABLE_SEPARATOR)
    model, _, adapter = both.partition(SEPARATOR)
    return Began(model, adapter, table)


def joined_fingerprint(began: Began) -> str:
    adapter = began.adapter and f"{SEPARATOR}{began.adapter}"
    table = began.table and f"{TABLE_SEPARATOR}{began.table}"
    return f"{began.model}{adapter}{table}"


def changed(message: str) -> RequestError:
    return RequestError(ErrorCode.MODEL_CHANGED, message)


def adapter_not_found(field: str, adapter_id: str) -> RequestError:
    violation = Violation(
        field, f"is {shown(adapter_id)}; no adapter is loaded under this id", private=True, reason=Reason.UNKNOWN_VALUE
    )
    return RequestError.invalid([violation], ErrorCode.ADAPTER_NOT_FOUND)


def _has_begun(spec: pb.GenerationSpec) -> bool:
    """Whether it resumes a stream of which it says with what that began."""
    return any(part.token_ids for part in spec.resume) and any(part.model_fingerprint for part in spec.resume)


def _named(spec: pb.GenerationSpec, model: Model, bad: Violations) -> tuple[str, str]:
    """The field that names the adapter, and the id; empty: none does."""
    by_model = spec.model if spec.model not in ("", model.name) else ""
    if spec.lora_id:
        check_id("spec.lora_id", spec.lora_id, model, bad)
        if by_model not in ("", spec.lora_id):
            both = f"is {shown(spec.lora_id)}, but spec.model names another adapter, {shown(by_model)}"
            bad.add("spec.lora_id", both, private=True, reason=Reason.CONFLICT)
        return "spec.lora_id", spec.lora_id
    return "spec.model", by_model
