"""What makes a request invalid for an engine in any state; None: nothing does."""

from engine_worker.request import remaining
from sluice.ring.images import Image
from sluice.ring.shared_tables import SharedTables
from sluice.ring.tables import PromptTables, Table
from sluice.ring.wire import Submit


def rows_problem(spec: Submit) -> str | None:
    for index, rows in spec.tensors.output_rows.items():
        if rows > len(spec.resume.get(index, ())):
            return f"tensors must have at most as many rows as resume has tokens, got {rows} for sequence {index}"
    if spec.tensors.context_rows > len(spec.prompt):
        return f"tensors must have at most {len(spec.prompt)} rows of the prompt, got {spec.tensors.context_rows}"
    return None


def tables_problem(spec: Submit, hidden_size: int, image_rows: int, known: SharedTables[Table | Image]) -> str | None:
    """`hidden_size`, `image_rows`: see `Runner`. `known`: of live requests."""
    found = spec.tables
    if not found:
        return "extra_ids must be empty without tables" if found.extra_ids else None
    problem = _table_problem(found, hidden_size, known) or _image_problem(found, image_rows, known)
    if problem is not None:
        return problem
    if found.extra_ids and len(found.extra_ids) != len(spec.prompt):
        return f"extra_ids must be one per prompt token, {len(spec.prompt)}, not {len(found.extra_ids)}"
    if spec.prompt_logprobs is not None:
        return "prompt_logprobs cannot be combined with tables or images: virtual tokens have no probability"
    return None


def _table_problem(given: PromptTables, hidden_size: int, known: SharedTables[Table | Image]) -> str | None:
    if given.tables and not hidden_size:
        return "this engine takes no prompt tables or embeddings with this model"
    for i, table in enumerate(given.tables):
        if table.hidden_size != hidden_size:
            return f"table {i} must have rows of {hidden_size}, the model's hidden size, not {table.hidden_size}"
        if not known.knows(table) and not table.intact:
            return f"table {i} has other rows than its digest says"
    return None


def _image_problem(given: PromptTables, image_rows: int, known: SharedTables[Table | Image]) -> str | None:
    if given.images and not image_rows:
        return "this engine takes no images with this model"
    for i, image in enumerate(given.images):
        # Those of a grid follow from the picture, which is looked at when they are computed.
        if not image.columns and image.rows != image_rows:
            return f"image {i} must have {image_rows} rows, not {image.rows}"
        if not known.knows(image) and not image.intact:
            return f"image {i} has other data than its digest says"
    return None


def resume_problem(spec: Submit, vocab_size: int) -> str | None:
    for name, indexes in (("resume", spec.resume), ("ended", spec.ended)):
        unknown = [index for index in indexes if not 0 <= index < spec.n]
        if unknown:
            return f"{name} must name sequences from 0 to {spec.n - 1}, got {unknown[0]}"
    if not remaining(spec):
        return f"ended must not name all of the {spec.n} sequences"
    if spec.prompt_logprobs is not None and any(spec.resume.values()):
        return "prompt_logprobs must be unset where resume has tokens: they have come before these"
    max_tokens = spec.stopping.max_tokens
    for index, tokens in spec.resume.items():
        if len(tokens) > max_tokens:
            return f"resume must have at most max_tokens ({max_tokens}) tokens, got {len(tokens)} for sequence {index}"
        invalid = [token for token in tokens if not 0 <= token < vocab_size]
        if invalid:
            return f"resume token ids must be from 0 to {vocab_size - 1}, got {invalid[0]} in sequence {index}"
    return None
