"""The option `guided`, in the forms that users of Python expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def guide_fields(guide: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of sluice.v1.GuidedDecoding.

    `json_schema` and `structural_tag` may be mappings in place of JSON texts, `json_schema` also a Pydantic model,
    `choice` the list of texts, and `json_object` True. Raises TypeError or ValueError for a mapping that is not JSON.
    """
    fields = {name: _field(name, value) for name, value in guide.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _field(name: str, value: Any) -> Any:
    match name:
        case "json_schema" | "structural_tag" if isinstance(value, Mapping):
            return json.dumps(value)
        case "json_schema" if isinstance(value, type) and hasattr(value, "model_json_schema"):
            return json.dumps(value.model_json_schema())
        case "choice" if isinstance(value, Sequence) and not isinstance(value, str):
            return {"choices": value}
        case "json_object" if isinstance(value, bool):
            return {} if value else None
    return value
