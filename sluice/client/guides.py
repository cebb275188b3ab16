"""The option `guided`, in the forms that users of Python expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any


def is_model(value: Any) -> bool:
    """Whether the value is a Pydantic model."""
    return isinstance(value, type) and hasattr(value, "model_json_schema")


def guide_fields(guide: Any) -> Any:
    """The fields of sluice.v1.GuidedDecoding. A value of another type is returned as it is.

    The guide itself may be a Pydantic model in place of `{"json_schema": model}`. `json_schema` and `structural_tag`
    may be mappings in place of JSON texts, `json_schema` also a Pydantic model, `choice` the list of texts, and
    `json_object` True. Raises TypeError or ValueError for a mapping that is not JSON.
    """
    if is_model(guide):
        guide = {"json_schema": guide}
    if not isinstance(guide, Mapping):
        return guide
    fields = {name: _field(name, value) for name, value in guide.items()}
    return {name: value for name, value in fields.items() if value is not None}


def _field(name: str, value: Any) -> Any:
    match name:
        case "json_schema" | "structural_tag" if isinstance(value, Mapping):
            return json.dumps(value)
        case "json_schema" if is_model(value):
            return json.dumps(value.model_json_schema())
        case "choice" if isinstance(value, Sequence) and not isinstance(value, str):
            return {"choices": value}
        case "json_object" if isinstance(value, bool):
            return {} if value else None
    return value
