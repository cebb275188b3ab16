"""Checks of requests that do not depend on the engine's state. Each returns the problem, or None."""

from engine_worker.request import remaining
from sluice.wire.images import Image
from sluice.wire.requests import Submit
from sluice.wire.shared_tables import SharedTables
from sluice.wire.tables import PromptTables, Table
from sluice.wire.tensors import TensorParams


def rows_problem(submit: Submit, tensors: TensorParams) -> str | None:
    for index, rows in tensors.output_rows.items():
        if rows > len(submit.resume.get(index, ())):
            return f"tensors must have at most as many rows as resume has tokens (got {rows} for sequence {index})"
    if tensors.context_rows > len(submit.prompt):
        return f"tensors must have at most {len(submit.prompt)} rows of the prompt (got {tensors.context_rows})"
    return None


def tables_problem(
    submit: Submit, tables: PromptTables, hidden_size: int, image_rows: int, known: SharedTables[Table | Image]
) -> str | None:
    """`hidden_size`, `image_rows`: see `Runner`. `known`: tables and images of live requests, which need not be hashed
    again."""
    if not tables:
        return "extra_ids must be empty without tables" if tables.extra_ids else None
    problem = _table_problem(tables, hidden_size, known) or _image_problem(tables, image_rows, known)
    if problem is not None:
        return problem
    if tables.extra_ids and len(tables.extra_ids) != len(submit.prompt):
        return f"extra_ids must have {len(submit.prompt)} ids, one per prompt token (got {len(tables.extra_ids)})"
    if submit.prompt_logprobs is not None:
        return "prompt_logprobs cannot be combined with tables or images: virtual tokens have no probability"
    return None


def _table_problem(given: PromptTables, hidden_size: int, known: SharedTables[Table | Image]) -> str | None:
    if given.tables and not hidden_size:
        return "this engine does not support prompt tables or embeddings with this model"
    for i, table in enumerate(given.tables):
        if table.hidden_size != hidden_size:
            return f"table {i} must have rows of the model's hidden size, {hidden_size} (got {table.hidden_size})"
        if not known.knows(table) and not table.intact:
            return f"table {i} does not match its digest"
    return None


def _image_problem(given: PromptTables, image_rows: int, known: SharedTables[Table | Image]) -> str | None:
    if given.images and not image_rows:
        return "this engine does not support images with this model"
    for i, image in enumerate(given.images):
        # The rows of a grid depend on the size of the picture, which is checked when they are computed.
        if not image.columns and image.rows != image_rows:
            return f"image {i} must have {image_rows} rows (got {image.rows})"
        if not known.knows(image) and not image.intact:
            return f"image {i} does not match its digest"
    return None


def resume_problem(submit: Submit, vocab_size: int) -> str | None:
    for name, indexes in (("resume", submit.resume), ("ended", submit.ended)):
        unknown = [index for index in indexes if not 0 <= index < submit.n]
        if unknown:
            return f"{name} must name sequences from 0 to {submit.n - 1} (got {unknown[0]})"
    if not remaining(submit):
        return f"ended must not name all of the {submit.n} sequences"
    if submit.prompt_logprobs is not None and any(submit.resume.values()):
        return "prompt_logprobs must be unset where resume has tokens: they have been delivered before these"
    max_tokens = submit.stopping.max_tokens
    for index, tokens in submit.resume.items():
        if len(tokens) > max_tokens:
            return f"resume must have at most {max_tokens} (max_tokens) tokens (got {len(tokens)} for sequence {index})"
        invalid = [token for token in tokens if not 0 <= token < vocab_size]
        if invalid:
            return f"resume token ids must be from 0 to {vocab_size - 1} (got {invalid[0]} in sequence {index})"
    return None
