"""Prompt tables: rows of embeddings that a request brings, or names by the id of a prompt adapter, and the virtual
tokens that stand for them."""

import re
from collections.abc import Callable, Set
from dataclasses import dataclass, replace
from typing import get_args

from router.errors import Reason, RequestError, Violation, Violations, shown
from router.validate.adapter import Began, adapter_not_found, changed, check_form
from router.validate.model import Limits
from sluice.ring.errors import ErrorCode
from sluice.ring.prompt_adapters import version_of
from sluice.ring.tables import FLOAT_BYTES, MAX_TABLE_BYTES, FloatType, PromptTables, Table
from sluice.v1 import generation_pb2 as pb

TYPES = get_args(FloatType)
HUGE = {"float16": re.compile(rb"[\x7c-\x7f\xfc-\xff]")} | dict.fromkeys(
    ("float32", "bfloat16"), re.compile(rb"[\x7f\xff]")
)
"""The highest byte of values that are infinite or not a number; of the larger types also of those from 2^127 on, which
no model can compute with."""
PROMPT_FIELD = "spec.prompt_embeds"
TABLE_FIELD = "spec.prompt_table"
ADAPTER_FIELD = "spec.prompt_adapter_id"

FindTable = Callable[[str, str], Table | None]
"""By the id of a prompt adapter, and by version; an empty version is the current one."""


@dataclass(frozen=True, slots=True)
class GivenTable:
    """Its sizes are checked, its values are not, unless it is of a prompt adapter."""

    field: str
    rows: int
    hidden_size: int
    dtype: FloatType
    data: bytes | memoryview
    extra_ids: tuple[int, ...] = ()
    """Of the prompt's tokens."""
    prepended: bool = False
    """Its rows come before the tokens of a text or a chat; else the prompt has their ids."""
    table: Table | None = None
    """Of a prompt adapter."""

    @property
    def version(self) -> str:
        """Of the prompt adapter; empty: the request brought the rows."""
        return "" if self.table is None else version_of(self.table)

    @property
    def num_prepended(self) -> int:
        return self.rows if self.prepended else 0

    def load(self) -> PromptTables:
        """Takes some milliseconds per megabyte. Raises RequestError for values that are not finite."""
        return PromptTables((self.table or self.checked(),), self.extra_ids)

    def checked(self) -> Table:
        """Raises as `load`."""
        size = FLOAT_BYTES[self.dtype]
        found = HUGE[self.dtype].search(self.data[size - 1 :: size])
        if found is not None:
            row, column = divmod(found.start(), self.hidden_size)
            description = f"has a value in row {row}, column {column} that is infinite, not a number, or too large"
            raise RequestError.invalid([Violation(f"{self.field}.data", description)])
        return Table.of(self.rows, self.hidden_size, self.dtype, self.data)


def no_tables(_: str, __: str) -> None:
    """See `FindTable`."""


def parse_table(
    spec: pb.GenerationSpec, limits: Limits, bad: Violations, find: FindTable, began: Began
) -> GivenTable | None:
    """None: the request brings no rows, or `bad` has their violations. `began`: what the stream to be resumed began
    with.

    Raises RequestError: ADAPTER_NOT_FOUND, ADAPTER_MISSING, MODEL_CHANGED.
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
    table = spec.prompt_table
    found = check_rows(f"{TABLE_FIELD}.embeddings", table.embeddings, limits, bad)
    if found is None:
        return None
    return replace(found, extra_ids=tuple(table.token_extra_ids), prepended=kind != "token_ids")


def check_rows(field: str, message: pb.Embeddings, limits: Limits, bad: Violations) -> GivenTable | None:
    """None if they have violations. Their values are not checked yet."""
    before, shape, dtype = len(bad.found), list(message.shape), message.dtype
    if len(shape) != 2 or 0 in shape:
        bad.add(
            f"{field}.shape",
            f"is {shown(shape[:8])}, must be two sizes of at least 1: rows, hidden size",
            reason=Reason.INVALID_FORMAT,
        )
    else:
        bad.at_most(f"{field}.shape", shape[0], limits.prompt_ids, "rows")
    if dtype not in FLOAT_BYTES:
        bad.add(f"{field}.dtype", f"is {shown(dtype)}, must be one of {', '.join(TYPES)}", reason=Reason.UNKNOWN_VALUE)
    if len(bad.found) > before:
        return None
    rows, hidden_size = shape
    size, data = rows * hidden_size * FLOAT_BYTES[dtype], message.data
    if bad.at_most(f"{field}.data", len(data), MAX_TABLE_BYTES, "bytes") and len(data) != size:
        bad.add(
            f"{field}.data",
            f"has {len(data)} bytes, {rows} rows of {hidden_size} {dtype} have {size}",
            reason=Reason.INVALID_FORMAT,
        )
    kind: FloatType = dtype  # type: ignore[assignment]  # checked above
    if len(bad.found) > before:
        return None
    return GivenTable(field, rows, hidden_size, kind, data)


def check_hidden_size(table: GivenTable | None, known: Set[int] | None) -> None:
    """Raises RequestError if no engine takes such rows. `known`: hidden sizes of those that take some; None: no engine
    has said it."""
    if table is None or known is None or table.hidden_size in known:
        return
    takes = "no engine takes any with this model"
    if known:
        takes = f"the model's hidden size is {' or '.join(map(str, sorted(known)))}"
    field = f"{table.field}.shape" if table.table is None else table.field
    raise RequestError.invalid([Violation(field, f"has rows of {table.hidden_size}; {takes}", reason=Reason.CONFLICT)])


def _loaded(spec: pb.GenerationSpec, find: FindTable, began: Began, bad: Violations) -> GivenTable | None:
    """Of a prompt adapter."""
    adapter_id = spec.prompt_adapter_id
    if not check_form(ADAPTER_FIELD, adapter_id, bad):
        return None
    if began.model and not began.table and any(part.token_ids for part in spec.resume):
        raise changed("the stream began without a prompt adapter")
    # That of its beginning, whatever the id stands for now.
    table = find(adapter_id, began.table)
    if table is None and began.table:
        message = f"the rows of {shown(adapter_id)} with which the stream began are not here any more"
        raise RequestError(ErrorCode.ADAPTER_MISSING, message, private=True)
    if table is None:
        raise adapter_not_found(ADAPTER_FIELD, adapter_id)
    prepended = spec.WhichOneof("prompt") != "token_ids"
    return GivenTable(
        ADAPTER_FIELD, table.rows, table.hidden_size, table.dtype, table.data, prepended=prepended, table=table
    )


def _conflicts(spec: pb.GenerationSpec, kind: str | None) -> list[tuple[str, str]]:
    """The fields that cannot be combined, with the reasons."""
    sources = {
        PROMPT_FIELD: kind == "prompt_embeds",
        TABLE_FIELD: spec.HasField("prompt_table"),
        ADAPTER_FIELD: bool(spec.prompt_adapter_id),
    }
    given, *others = [field for field, is_set in sources.items() if is_set] or [""]
    if not given:
        return []
    found = [(field, f"is set, cannot be combined with {given}") for field in others]
    if spec.output.HasField("prompt_logprobs"):
        reason = f"is {spec.output.prompt_logprobs}, cannot be combined with {given}, whose rows have no probability"
        found.append(("spec.output.prompt_logprobs", reason))
    extra = len(spec.prompt_table.token_extra_ids)
    if kind == "token_ids":
        if extra not in (0, len(spec.token_ids.ids)):
            reason = f"has {extra} ids, must have none, or one per token of the prompt: {len(spec.token_ids.ids)}"
            found.append((f"{TABLE_FIELD}.token_extra_ids", reason))
    else:
        if extra:
            found.append((f"{TABLE_FIELD}.token_extra_ids", f"has {extra} ids, may have some with spec.token_ids only"))
        if kind != "prompt_embeds" and spec.HasField("truncate_prompt_tokens"):
            reason = f"is {spec.truncate_prompt_tokens}, cannot be combined with {given}, unless with token ids"
            found.append(("spec.truncate_prompt_tokens", reason))
    return found
