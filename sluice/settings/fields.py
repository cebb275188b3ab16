"""The types that settings are declared with, and the sections that services share.

A section is a frozen dataclass: a field is a setting, the docstring under it its description in the help and in
docs/settings.md. A service's settings inherit its sections, so they are passed whole to whatever takes one of these.
"""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Final, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a number, which pydantic checks."""

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        # Imported here, because bench.gpu uses sections on machines without pydantic.
        from pydantic import Field

        return handler.generate_schema(Annotated[source, Field(**asdict(self))])


@dataclass(frozen=True, slots=True)
class NotEmpty:
    """Of a string: at least one character."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import Field

        return handler.generate_schema(Annotated[source, Field(min_length=1)])


class OtherVariable(NamedTuple):
    """Annotation of a setting that is also read from an environment variable which other programs share."""

    name: str


class ByteSize:
    """Annotation of a number of bytes, which may also be given as text such as 8GiB."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import AfterValidator, ByteSize, Field

        return handler.generate_schema(Annotated[ByteSize, Field(ge=0), AfterValidator(int)])


Seconds = Annotated[float, Range(ge=0)]
PositiveSeconds = Annotated[float, Range(gt=0)]
PositiveInt = Annotated[int, Range(ge=1)]
PortNumber = Annotated[int, Range(ge=0, le=65535)]
ByteCount = Annotated[int, ByteSize()]
LAUNCHER: Final = "launcher"
"""Annotation of a setting that only a launcher passes: it is left out of the help and of docs/settings.md."""


def section_of(settings: object, section: type[T]) -> T:
    """The fields of `section` alone; those that are no settings keep their defaults."""
    names = [each.name for each in fields(section) if hasattr(settings, each.name)]  # type: ignore[arg-type]
    return section(**{name: getattr(settings, name) for name in names})


@dataclass(frozen=True)
class PriorityAging:
    """Priorities"""

    priority_aging_seconds: Annotated[float, Range(ge=0, le=1e9)] = 30.0
    """A waiting request gains one priority class in this many seconds; 0: never. Router and engines need the same
    value."""
