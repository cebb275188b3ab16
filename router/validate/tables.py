"""Prompt tables: rows of embeddings that a request brings, and the virtual tokens that stand for them."""

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import get_args

from router.errors import RequestError, Violation, Violations, shown
from router.validate.model import Limits
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


@dataclass(frozen=True, slots=True)
class GivenTable:
    """Its sizes are checked, its values are not."""

    field: str
    rows: int
    hidden_size: int
    dtype: FloatType
    data: bytes
    extra_ids: tuple[int, ...]
    """Of the prompt's tokens."""
    prepended: bool
    """Its rows come before the tokens of a text or a chat; else the prompt has their ids."""

    @property
    def num_prepended(self) -> int:
        return self.rows if self.prepended else 0

    def load(self) -> PromptTables:
        """Takes some milliseconds per megabyte. Raises RequestError for values that are not finite."""
        size = FLOAT_BYTES[self.dtype]
        found = HUGE[self.dtype].search(self.data[size - 1 :: size])
        if found is not None:
            row, column = divmod(found.start(), self.hidden_size)
            description = f"has a value in row {row}, column {column} that is infinite, not a number, or too large"
            raise RequestError.invalid([Violation(f"{self.field}.data", description)])
        table = Table.of(self.rows, self.hidden_size, self.dtype, self.data)
        return PromptTables((table,), self.extra_ids)


def parse_table(spec: pb.GenerationSpec, limits: Limits, bad: Violations) -> GivenTable | None:
    """None if there is none, or if it has violations."""
    kind = spec.WhichOneof("prompt")
    for field, reason in _conflicts(spec, kind):
        bad.add(field, reason)
    if kind == "prompt_embeds":
        return _given(PROMPT_FIELD, spec.prompt_embeds, (), False, limits, bad)
    if not spec.HasField("prompt_table"):
        return None
    table = spec.prompt_table
    extra_ids = tuple(table.token_extra_ids)
    return _given(f"{TABLE_FIELD}.embeddings", table.embeddings, extra_ids, kind != "token_ids", limits, bad)


def check_hidden_size(table: GivenTable | None, known: Set[int] | None) -> None:
    """Raises RequestError if no engine takes such rows. `known`: hidden sizes of those that take some; None: no engine
    has said it."""
    if table is None or known is None or table.hidden_size in known:
        return
    takes = "no engine takes any with this model"
    if known:
        takes = f"the model's hidden size is {' or '.join(map(str, sorted(known)))}"
    raise RequestError.invalid([Violation(f"{table.field}.shape", f"has rows of {table.hidden_size}; {takes}")])


def _given(
    field: str,
    message: pb.Embeddings,
    extra_ids: tuple[int, ...],
    prepended: bool,
    limits: Limits,
    bad: Violations,
) -> GivenTable | None:
    before, shape, dtype = len(bad.found), list(message.shape), message.dtype
    if len(shape) != 2 or 0 in shape:
        bad.add(f"{field}.shape", f"is {shown(shape[:8])}, must be two sizes of at least 1: rows, hidden size")
    else:
        bad.at_most(f"{field}.shape", shape[0], limits.prompt_ids, "rows")
    if dtype not in FLOAT_BYTES:
        bad.add(f"{field}.dtype", f"is {shown(dtype)}, must be one of {', '.join(TYPES)}")
    if len(bad.found) > before:
        return None
    rows, hidden_size = shape
    size, data = rows * hidden_size * FLOAT_BYTES[dtype], message.data
    if bad.at_most(f"{field}.data", len(data), MAX_TABLE_BYTES, "bytes") and len(data) != size:
        bad.add(f"{field}.data", f"has {len(data)} bytes, {rows} rows of {hidden_size} {dtype} have {size}")
    kind: FloatType = dtype  # type: ignore[assignment]  # checked above
    if len(bad.found) > before:
        return None
    return GivenTable(field, rows, hidden_size, kind, data, extra_ids, prepended)


def _conflicts(spec: pb.GenerationSpec, kind: str | None) -> list[tuple[str, str]]:
    found = []
    if kind != "prompt_embeds" and not spec.HasField("prompt_table"):
        return []
    given = PROMPT_FIELD if kind == "prompt_embeds" else TABLE_FIELD
    if kind == "prompt_embeds" and spec.HasField("prompt_table"):
        found.append((TABLE_FIELD, f"is set, cannot be combined with {PROMPT_FIELD}"))
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
            reason = f"is {spec.truncate_prompt_tokens}, cannot be combined with {TABLE_FIELD}, unless with token ids"
            found.append(("spec.truncate_prompt_tokens", reason))
    return found
