"""Ids of LoRA adapters and of prompt adapters."""

from router.errors import Reason, RequestError, Violation, Violations, shown
from router.parse.model import ServedModel
from sluice.wire.adapters import ADAPTER_ID, MAX_ID_CHARS
from sluice.wire.errors import ErrorCode


def check_id(field: str, adapter_id: str, model: ServedModel, bad: Violations) -> None:
    """Check the id of a LoRA adapter. It must differ from the model's name, since clients select both by one field."""
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


def adapter_not_found(field: str, adapter_id: str) -> RequestError:
    violation = Violation(
        field, f"is {shown(adapter_id)}; no adapter is loaded under this id", private=True, reason=Reason.UNKNOWN_VALUE
    )
    return RequestError.invalid([violation], ErrorCode.ADAPTER_NOT_FOUND)
