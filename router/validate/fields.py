"""The fields of GenerationSpec that are rejected because they are not implemented yet."""

from router.errors import Reason, RequestError, Violation
from sluice.v1.generation_pb2 import GenerationSpec
from sluice.wire.errors import ErrorCode

REJECTED: frozenset[str] = frozenset()
"""Paths of fields that are in the .proto but not implemented; none at present. A test walks the descriptor and requires
a sample of every field that is not listed here."""

GROUPS = frozenset(path.partition(".")[0] for path in REJECTED if "." in path)
"""Messages of which some fields are rejected."""


def reject_unbuilt(spec: GenerationSpec) -> None:
    """Raises RequestError NOT_BUILT_YET that names every rejected field."""
    rejected = [f"spec.{path}" for path in sorted(_fields(spec) & REJECTED)]
    if rejected:
        raise RequestError(
            ErrorCode.NOT_BUILT_YET,
            f"not built yet: {', '.join(rejected)}",
            [Violation(path, "is not built yet: leave it unset or off", reason=Reason.NOT_BUILT) for path in rejected],
        )


def _fields(spec: GenerationSpec) -> set[str]:
    """Paths of the fields that are set. Of fields within messages, only those of GROUPS."""
    paths = set()
    for field, value in spec.ListFields():
        paths.add(field.name)
        if field.name in GROUPS:
            paths.update(f"{field.name}.{inner.name}" for inner, _ in value.ListFields())
    return paths
