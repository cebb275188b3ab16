"""The joints at which a request meets the optional features that it uses. A plain request uses none."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

from google.protobuf.message import Message

from router.errors import Violations
from router.requests.token_log import RequestLog
from router.validate.needs import Need
from sluice.v1 import generation_pb2 as pb

NESTED = ("sampling", "output")
"""Messages of a GenerationSpec whose fields belong to several features."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a request asks of one feature. The methods are in the order in which a request passes them; a feature
    overrides those that it needs."""

    def needs(self) -> Iterable[Need]:
        """What the engine must offer."""
        return ()

    def during(self, log: RequestLog, interrupt: Callable[[], None]) -> AbstractContextManager[None]:  # noqa: ARG002
        """A context that is open for as long as the request is. To end the request, `log.fail` and then `interrupt`,
        which ends its preparation if it is still being prepared."""
        return nullcontext()

    def prepare(self, prompt_tokens: int, log: RequestLog) -> None:
        """The prompt is tokenized and fits the context. Raises RequestError."""

    def submitted(self, log: RequestLog) -> dict[str, Any]:  # noqa: ARG002 - for those that override it
        """The feature's fields of `Extras` for the next attempt."""
        return {}


class Feature(Protocol):
    """Reads its fields of a request."""

    @property
    def fields(self) -> Collection[str]:
        """The fields of GenerationSpec that ask for it, such as `guided` or `output.tensors`."""

    def parse(self, message: pb.GenerationSpec, bad: Violations) -> Part | None:
        """The request's part, which must not be used if `bad` has violations. None if it asks for nothing after all."""


def parse_parts(features: Sequence[Feature], message: pb.GenerationSpec, bad: Violations) -> tuple[Part, ...]:
    """A part for each feature that the request asks for, in the order of `features`."""
    names = frozenset(set_fields(message))
    asked = (feature for feature in features if not names.isdisjoint(feature.fields))
    return tuple(part for feature in asked if (part := feature.parse(message, bad)) is not None)


def set_fields(message: Message) -> Iterator[str]:
    """Names of the fields that are set, those within NESTED as paths."""
    for field, value in message.ListFields():
        if field.name in NESTED:
            yield from (f"{field.name}.{inner.name}" for inner, _ in value.ListFields())
        else:
            yield field.name
