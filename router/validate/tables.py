"""Prompt tables: rows of embeddings that a request contains, or selects by the id of a prompt adapter. Virtual tokens
stand for the rows."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from router.errors import Reason, RequestError, Violation, Violations, shown
from router.validate.adapter import adapter_not_found, changed, check_form
from router.validate.model import Began, Limits
from router.validate.needs import Need
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

FindTable = Callable[[str, str], Table | None]
"""Looks up a table by the id of a prompt adapter and by version; an empty version stands for the current one."""


@dataclass(frozen=True, slots=True)
class GivenTable:
    """A request's table. Its sizes are checked, but not its values, unless it belongs to a prompt adapter."""

    field: str
    rows: int
    hidden_size: int
    dtype: FloatType
    data: bytes | memoryview
    extra_ids: tuple[int, ...] = ()
    """Extra ids of the prompt's tokens."""
    prepended: bool = False
    """The rows precede the tokens of a text or a chat. Otherwise the prompt contains their ids."""
    table: Table | None = None
    """The table of a prompt adapter; None if the request contains the rows."""

    @property
    def version(self) -> str:
        """Version of the prompt adapter; empty if the request contains the rows."""
        return "" if self.table is None else version_of(self.table)

    @property
    def num_prepended(self) -> int:
        return self.rows if self.prepended else 0

    def load(self) -> PromptTables:
        """The table with checked values, which takes some milliseconds per megabyte. Raises RequestError for values
        that are not finite."""
        return PromptTables((self.table or self.checked(),), self.extra_ids)

    def checked(self) -> Table:
        """The rows as a `Table`. Raises RequestError for values that are not finite."""
        size = FLOAT_BYTES[self.dtype]
        match = HUGE[self.dtype].search(self.data[size - 1 :: size])
        if match is not None:
            row, column = divmod(match.start(), self.hidden_size)
            description = f"has a value in row {row}, column {column} that is infinite, not a number, or too large"
            raise RequestError.invalid([Violation(f"{self.field}.data", description)])
        return Table.of(self.rows, self.hidden_size, self.dtype, self.data)


def no_tables(_: str, __: str) -> None:
    """See `FindTable`."""


def parse_table(
    spec: pb.GenerationSpec, limits: Limits, bad: Violations, find: FindTable, began: Began
) -> GivenTable | None:
    """The request's table; None if it has none, or if `bad` has violations of it.

    `began`: the model and adapters with which the resumed stream began. Raises RequestError ADAPTER_NOT_FOUND,
    ADAPTER_MISSING, MODEL_CHANGED.
    """
    kind = spec.WhichOneof("prompt")
    for field, reason in _conflicts(spec, kind):
        bad.add(field, reason, reason=Reason.CONFLICT)
    if spec.prompt_adapter_id:
        return _loaded(spec, find, began, bad)
    if began.table:
        raise changed(f"the stream began with a prompt adapter: name it in {ADAPTER_FIELD}")
    if kind == "prompt_embeds":
        return check_rows(PROMPT_FIELD, spec.prompt_embeds, limits, bad)
    if not spec.HasField("prompt_table"):
        return None
    message = spec.prompt_table
    table = check_rows(f"{TABLE_FIELD}.embeddings", message.embeddings, limits, bad)
    if table is None:
        return None
    return replace(table, extra_ids=tuple(message.token_extra_ids), prepended=kind != "token_ids")


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


def table_need(table: GivenTable) -> Need:
    def refuse(sizes: Sequence[str]) -> Violation:
        reason = f"the model's hidden size is {' or '.join(sizes)}"
        if not sizes:
            reason = "no engine supports embeddings with this model"
        field = f"{table.field}.shape" if table.table is None else table.field
        problem = f"has rows of {table.hidden_size} values, but {reason}"
        return Violation(field, problem, reason=Reason.CONFLICT)

    noun = f"prompt tables with rows of {table.hidden_size} values"
    return Need("prompt_rows", str(table.hidden_size), noun, "", refuse)


def _loaded(spec: pb.GenerationSpec, find: FindTable, began: Began, bad: Violations) -> GivenTable | None:
    """The table of the prompt adapter that the request names."""
    adapter_id = spec.prompt_adapter_id
    if not check_form(ADAPTER_FIELD, adapter_id, bad):
        return None
    if began.model and not began.table and any(part.token_ids for part in spec.resume):
        raise changed("the stream began without a prompt adapter")
    # Use the table with which the stream began, even if the id refers to another one now.
    table = find(adapter_id, began.table)
    if table is None and began.table:
        message = f"the rows of {shown(adapter_id)} with which the stream began are no longer available"
        raise RequestError(ErrorCode.ADAPTER_MISSING, message, private=True)
    if table is None:
        raise adapter_not_found(ADAPTER_FIELD, adapter_id)
    prepended = spec.WhichOneof("prompt") != "token_ids"
    return GivenTable(
        ADAPTER_FIELD, table.rows, table.hidden_size, table.dtype, table.data, prepended=prepended, table=table
    )


def _conflicts(spec: pb.GenerationSpec, kind: str | None) -> list[tuple[str, str]]:
    """(field, reason) for each field that cannot be combined with the request's table."""
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
