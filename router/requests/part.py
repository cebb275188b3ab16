"""The interface between requests and the optional features that they use. A plain request uses none."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from google.protobuf.message import Message

from router.errors import Violations
from router.parse.model import MAX_MESSAGES
from router.peers.offers import Need
from router.peers.peers import EnginePeer
from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import Fault
from sluice.wire.params import RetentionParams, SamplingParams
from sluice.wire.tables import PromptTables, Table

NESTED = ("sampling", "output", "kv_cache")
"""Messages of a GenerationSpec whose fields belong to several features."""

CHAT_PARTS = "chat.messages.parts"
"""Stands for `chat` in a request with at least one message that has parts instead of plain text."""

Interrupt = Callable[[], None]
"""Ends a request's preparation, if it is still being prepared."""


@dataclass(frozen=True, slots=True)
class Part:
    """What a request asks of one feature. The methods are in the order in which a request passes them; a feature
    overrides those that it needs."""

    def needs(self) -> Iterable[Need]:
        """What the engine must offer."""
        return ()

    def versions(self) -> Mapping[str, str]:
        """The fields of `Began` that identify the weights or embeddings that it uses in addition to the model's."""
        return {}

    def during(self, log: RequestLog, interrupt: Interrupt) -> AbstractContextManager[None]:
        """A context that is open for as long as the request is. To end the request, `log.fail` and then `interrupt`."""
        return nullcontext()

    @property
    def own_bytes(self) -> int:
        """Bytes of prompt tables and images that the request itself contains, and holds for later attempts."""
        return 0

    @property
    def shared_tables(self) -> tuple[Table, ...]:
        """Tables that requests may share."""
        return ()

    async def place(self, tokens: list[int], first: int, tenant: str) -> tuple[list[int], int]:
        """The prompt's `tokens`, before truncation, with the ids of the part's rows of embeddings; and the first id
        after those. `first`: the first id that stands for no token and no earlier row. Raises RequestError."""
        return tokens, first

    async def sampling(self, sampling: SamplingParams, tenant: str) -> SamplingParams:
        """`sampling` with the part's parameters. Raises RequestError."""
        return sampling

    def retention(self, retention: RetentionParams, prompt_tokens: int, kept_tokens: int) -> RetentionParams:
        """`retention` as requested for a prompt of `prompt_tokens` tokens that is truncated to its last `kept_tokens`.
        Raises RequestError."""
        return retention

    def prepare(self, prompt_tokens: int, log: RequestLog) -> None:
        """The prompt is tokenized and fits the context. Raises RequestError."""

    async def load(self, tables: PromptTables, tenant: str) -> PromptTables:
        """`tables` with the part's rows. Raises RequestError if they are invalid."""
        return tables

    def accepted_by(self, engine: EnginePeer) -> bool:
        """Whether the engine would accept the part now. False if it must wait a little."""
        return True

    def submitted(self, log: RequestLog) -> dict[str, Any]:
        """The feature's fields of `Extras` for the next attempt."""
        return {}

    def supply(self, engine: EnginePeer) -> bool:
        """Start sending an engine what it reported as missing. False if the part has nothing to send."""
        return False

    def named(self, fault: Fault) -> Fault:
        """The engine's `fault`, with the field that the caller used."""
        return fault


class Feature(Protocol):
    """Reads its fields of a request."""

    @property
    def fields(self) -> Collection[str]:
        """The fields of GenerationSpec that ask for it, such as `guided` or `output.tensors`. `model` does not ask for
        anything if it names the served model."""

    async def parse(self, message: pb.GenerationSpec, bad: Violations, tenant: str) -> Part | None:
        """The request's part, which must not be used if `bad` has violations. None if it asks for nothing after all.

        May wait until this router knows what the request names. Raises RequestError for what makes all violations
        pointless.
        """


async def parse_parts(
    features: Sequence[Feature], message: pb.GenerationSpec, served: str, bad: Violations, tenant: str = ""
) -> tuple[Part, ...]:
    """A part for each feature that the request asks for, in the order of `features`. `served`: name of the model.

    Raises RequestError.
    """
    names = frozenset(set_fields(message, served))
    asked = [feature for feature in features if not names.isdisjoint(feature.fields)]
    parts = [await feature.parse(message, bad, tenant) for feature in asked]
    return tuple(part for part in parts if part is not None)


def set_fields(message: Message, served: str) -> Iterator[str]:
    """Names of the fields that are set; paths for those inside NESTED. Omits `model` if it names the served model."""
    for field, value in message.ListFields():
        if field.name in NESTED:
            yield from (f"{field.name}.{inner.name}" for inner, _ in value.ListFields())
        elif field.name == "chat":
            yield field.name
            if any(turn.parts for turn in islice(value.messages, MAX_MESSAGES)):
                yield CHAT_PARTS
        elif field.name != "model" or value != served:
            yield field.name
