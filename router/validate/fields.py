"""The fields of GenerationSpec that are rejected because they are not built yet."""

from router.errors import Reason, RequestError, Violation
from sluice.ring.errors import ErrorCode
from sluice.v1.generation_pb2 import GenerationSpec

REJECTED: frozenset[str] = frozenset()
"""None at present: a field that is to be built later is listed here meanwhile. A test walks the descriptor: it has a
sample of each field of the .proto that is not in this table."""

GROUPS = frozenset(path.partition(".")[0] for path in REJECTED if "." in path)
"""Messages of which some fields are rejected."""


def reject_unbuilt(spec: GenerationSpec) -> None:
    """Raises RequestError NOT_BUILT_YET naming every rejected field."""
    found = [f"spec.{path}" for path in sorted(_fields(spec) & REJECTED)]
    if found:
        raise RequestError(
            ErrorCode.NOT_BUILT_YET,
            f"not built yet: {', '.join(found)}",
            [Violation(path, "is not built yet: leave it unset or off", reason=Reason.NOT_BUILT) for path in found],
        )


def _fields(spec: GenerationSpec) -> set[str]:
    """Paths of the fields that are set; of those within messages, only of GROUPS."""
    found = set()
    for field, value in spec.ListFields():
        found.add(field.name)
        if field.name in GROUPS:
            found.update(f"{field.name}.{inner.name}" for inner, _ in value.ListFields())
    return found
