"""The types that settings are declared with, and the sections that services share.

A section is a frozen dataclass. Each field is a setting; the docstring under it is its description in `--help` and in
docs/settings.md. The settings of a service inherit from its sections, so they can be passed wherever a section is
expected.
"""

from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Final, NamedTuple, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Bounds of a number, checked by pydantic."""

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
    """Annotation of a string that must not be empty."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic import Field

        return handler.generate_schema(Annotated[source, Field(min_length=1)])


class OtherVariable(NamedTuple):
    """Annotation of a setting that is also read from an environment variable shared with other programs."""

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
"""Annotation of a setting that only a launcher passes. It is omitted from `--help` and docs/settings.md."""
ADVANCED: Final = "advanced"
"""Annotation of a setting that exists only because TensorRT-LLM's configuration has it. `--help` and docs/settings.md
list these settings separately."""


def section_of(settings: object, section: type[T]) -> T:
    """An instance of `section` with the values of `settings`. Fields that `settings` lacks have their defaults."""
    names = [field.name for field in fields(section) if hasattr(settings, field.name)]  # type: ignore[arg-type]
    return section(**{name: getattr(settings, name) for name in names})


@dataclass(frozen=True)
class PriorityAging:
    """Priorities"""

    priority_aging_seconds: Annotated[float, Range(ge=0, le=1e9)] = 30.0
    """Seconds after which a waiting request moves up one priority class. 0: priorities never age. Router and engines
    must have the same value."""
