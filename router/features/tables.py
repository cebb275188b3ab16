"""Prompt tables: rows of embeddings that a request contains, or selects by the id of a prompt adapter. Virtual tokens
stand for the rows."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import msgspec

from router.errors import Reason, RequestError, Violation, Violations, shown
from router.parse.adapter_ids import adapter_not_found, check_form
from router.parse.model import Limits, ServedModel
from router.parse.resume import began_of, changed
from router.peers.offers import Need
from router.peers.prompt_adapters import PromptAdapters
from router.requests.part import Part
from router.text.tokenizer_pool import TokenizerPool
from sluice.v1 import generation_pb2 as pb
from sluice.wire.adapters import version_of
from sluice.wire.errors import ErrorCode
from sluice.wire.tables import FLOAT_BYTES, MAX_TABLE_BYTES, FloatType, PromptTables, Table

TYPES = get_args(FloatType)
HUGE = {"float16": re.compile(rb"[\x7c-\x7f\xfc-\xff]")} | dict.fromkeys(
    ("float32", "bfloat16"), re.compile(rb"[\x7f\xff]")
)
"""Matches the highest byte of values that are infinite or not a number. For the types with a larger range it also
matches values from 2^127 on, with which no model can compute."""
PROMPT_FIELD = "spec.prompt_embeds"
TABLE_FIELD = "spec.prompt_table"
ADAPTER_FIELD = "spec.prompt_adapter_id"


@dataclass(frozen=True)
class Tables:
    fields = frozenset({"prompt_embeds", "prompt_table", "prompt_adapter_id", "resume"})

    _model: ServedModel
    _limits: Limits
    _adapters: PromptAdapters
    _text: TokenizerPool

    async def parse(self, message: pb.GenerationSpec, bad: Violations, tenant: str) -> "_Rows | None":
        """Raises RequestError ADAPTER_NOT_FOUND, ADAPTER_MISSING, MODEL_CHANGED, or an error of
        `PromptAdapters.settle`."""
        if message.prompt_adapter_id:
            await self._adapters.settle(message.prompt_adapter_id, tenant)
        for path, reason in _conflicts(message):
            bad.add(path, reason, reason=Reason.CONFLICT)
        table = self._loaded(message, bad) if message.prompt_adapter_id else self._given(message, bad)
        if table is None:
            return None
        prepended = message.WhichOneof("prompt") != "token_ids"
        if not prepended and len(message.token_ids.ids) <= self._limits.prompt_ids:
            _check_virtual(message.token_ids.ids, table, self._model.vocab_size, bad)
        return _Rows(table, tuple(message.prompt_table.token_extra_ids), prepended, self._text)

    def _given(self, message: pb.GenerationSpec, bad: Violations) -> "GivenTable | None":
        """The table that the request contains."""
        if began_of(message.resume).table:
            raise changed(f"the stream began with a prompt adapter: name it in {ADAPTER_FIELD}")
        if message.WhichOneof("prompt") == "prompt_embeds":
            return check_rows(PROMPT_FIELD, message.prompt_embeds, self._limits, bad)
        if not message.HasField("prompt_table"):
            return None
        return check_rows(f"{TABLE_FIELD}.embeddings", message.prompt_table.embeddings, self._limits, bad)

    def _loaded(self, message: pb.GenerationSpec, bad: Violations) -> Table | None:
        """The table of the prompt adapter that the request names."""
        adapter_id, began = message.prompt_adapter_id, began_of(message.resume)
        if not check_form(ADAPTER_FIELD, adapter_id, bad):
            return None
        if began.model and not began.table and any(part.token_ids for part in message.resume):
            raise changed("the stream began without a prompt adapter")
        # Use the table with which the stream began, even if the id refers to another one now.
        table = self._adapters.find(adapter_id, began.table)
        if table is None and began.table:
            problem = f"the rows of {shown(adapter_id)} with which the stream began are no longer available"
            raise RequestError(ErrorCode.ADAPTER_MISSING, problem, private=True)
        if table is None:
            raise adapter_not_found(ADAPTER_FIELD, adapter_id)
        return table


@dataclass(frozen=True, slots=True)
class GivenTable:
    """A table that a message contains. Its sizes are checked, but not its values."""

    field: str
    rows: int
    hidden_size: int
    dtype: FloatType
    data: bytes

    def checked(self) -> Table:
        """The rows as a `Table`. Raises RequestError for values that are not finite."""
        size = FLOAT_BYTES[self.dtype]
        match = HUGE[self.dtype].search(self.data[size - 1 :: size])
        if match is not None:
            row, column = divmod(match.start(), self.hidden_size)
            description = f"has a value in row {row}, column {column} that is infinite, not a number, or too large"
            raise RequestError.at(f"{self.field}.data", description)
        return Table.of(self.rows, self.hidden_size, self.dtype, self.data)


@dataclass(frozen=True, slots=True)
class _Rows(Part):
    table: Table | GivenTable
    """A prompt adapter's table, or the one that the request contains."""
    extra_ids: tuple[int, ...]
    """Extra ids of the prompt's tokens."""
    prepended: bool
    """The rows precede the tokens of a text or a chat, or are the prompt. Otherwise the prompt contains their ids."""
    text: TokenizerPool = field(compare=False)

    def needs(self) -> Iterator[Need]:
        path = ADAPTER_FIELD if isinstance(self.table, Table) else f"{self.table.field}.shape"
        yield rows_need(path, self.table.hidden_size)

    def versions(self) -> Mapping[str, str]:
        return {"table": version_of(self.table)} if isinstance(self.table, Table) else {}

    @property
    def own_bytes(self) -> int:
        return 0 if isinstance(self.table, Table) else len(self.table.data)

    @property
    def shared_tables(self) -> tuple[Table, ...]:
        return (self.table,) if isinstance(self.table, Table) else ()

    async def place(self, tokens: list[int], first: int, _: str) -> tuple[list[int], int]:
        end = first + self.table.rows
        return [*range(first, end), *tokens] if self.prepended else tokens, end

    async def load(self, tables: PromptTables, tenant: str) -> PromptTables:
        table = self.table
        if isinstance(table, GivenTable):
            # Takes a few milliseconds per megabyte.
            table = await self.text.compute(len(table.data), table.checked, tenant)
        return msgspec.structs.replace(tables, tables=(table,), extra_ids=self.extra_ids)


def check_rows(field: str, message: pb.Embeddings, limits: Limits, bad: Violations) -> GivenTable | None:
    """The rows as a table; None if there are violations. Their values are not checked yet."""
    count_before, shape, dtype = len(bad.found), list(message.shape), message.dtype
    if len(shape) != 2 or 0 in shape:
        bad.add(
            f"{field}.shape",
            f"is {shown(shape[:8])}, must be [rows, hidden size], both at least 1",
            reason=Reason.INVALID_FORMAT,
        )
    else:
        bad.at_most(f"{field}.shape", shape[0], limits.prompt_ids, "rows")
    if dtype not in FLOAT_BYTES:
        bad.add(f"{field}.dtype", f"is {shown(dtype)}, must be one of {', '.join(TYPES)}", reason=Reason.UNKNOWN_VALUE)
    if len(bad.found) > count_before:
        return None
    rows, hidden_size = shape
    size, data = rows * hidden_size * FLOAT_BYTES[dtype], message.data
    if bad.at_most(f"{field}.data", len(data), MAX_TABLE_BYTES, "bytes") and len(data) != size:
        bad.add(
            f"{field}.data",
            f"has {len(data)} bytes, must have {size}: {rows} rows of {hidden_size} {dtype} values",
            reason=Reason.INVALID_FORMAT,
        )
    kind: FloatType = dtype  # type: ignore[assignment]  # checked above
    if len(bad.found) > count_before:
        return None
    return GivenTable(field, rows, hidden_size, kind, data)


def rows_need(path: str, hidden_size: int) -> Need:
    """`path`: the field to blame if no engine has rows of this size."""

    def refuse(sizes: Sequence[str]) -> Violation:
        reason = f"the model's hidden size is {' or '.join(sizes)}"
        if not sizes:
            reason = "no engine supports embeddings with this model"
        return Violation(path, f"has rows of {hidden_size} values, but {reason}", reason=Reason.CONFLICT)

    return Need("prompt_rows", str(hidden_size), f"prompt tables with rows of {hidden_size} values", "", refuse)


def _check_virtual(ids: Sequence[int], table: Table | GivenTable, vocab_size: int, bad: Violations) -> None:
    path, largest = "spec.token_ids.ids", max(ids, default=vocab_size)
    source = ADAPTER_FIELD if isinstance(table, Table) else TABLE_FIELD
    if largest >= vocab_size + table.rows:
        problem = f"is {largest}, but the vocabulary has {vocab_size} tokens and {source} {table.rows} rows"
        bad.add(f"{path}[{list(ids).index(largest)}]", problem, reason=Reason.OUT_OF_RANGE)
    elif largest < vocab_size:
        problem = f"does not use any row of {source}: id {vocab_size} is row 0, and so on"
        bad.add(path, problem, reason=Reason.OUT_OF_RANGE)


def _conflicts(spec: pb.GenerationSpec) -> list[tuple[str, str]]:
    """(field, reason) for each field that cannot be combined with the request's table."""
    kind = spec.WhichOneof("prompt")
    sources = {
        PROMPT_FIELD: kind == "prompt_embeds",
        TABLE_FIELD: spec.HasField("prompt_table"),
        ADAPTER_FIELD: bool(spec.prompt_adapter_id),
    }
    source, *others = [field for field, is_set in sources.items() if is_set] or [""]
    if not source:
        return []
    conflicts = [(field, f"is set, cannot be combined with {source}") for field in others]
    if spec.output.HasField("prompt_logprobs"):
        reason = f"is {spec.output.prompt_logprobs}, cannot be combined with {source}, whose rows have no probability"
        conflicts.append(("spec.output.prompt_logprobs", reason))
    extra = len(spec.prompt_table.token_extra_ids)
    if kind == "token_ids":
        if extra not in (0, len(spec.token_ids.ids)):
            reason = f"has {extra} ids, must have none or one per token of the prompt: {len(spec.token_ids.ids)}"
            conflicts.append((f"{TABLE_FIELD}.token_extra_ids", reason))
    else:
        if extra:
            reason = f"has {extra} ids, must have none unless the prompt is spec.token_ids"
            conflicts.append((f"{TABLE_FIELD}.token_extra_ids", reason))
        if kind != "prompt_embeds" and spec.HasField("truncate_prompt_tokens"):
            kept_tokens = spec.truncate_prompt_tokens
            reason = f"is {kept_tokens}, cannot be combined with {source} unless the prompt is spec.token_ids"
            conflicts.append(("spec.truncate_prompt_tokens", reason))
    return conflicts
