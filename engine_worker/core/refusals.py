"""Which requests with optional features an engine refuses, and why."""

from dataclasses import dataclass

from engine_worker.kvcache.pool import Geometry
from engine_worker.protocol import Runner
from engine_worker.speculative.proposals import proposals_problem
from sluice.settings.engine import Batching
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.offers import LORA, Offer, offer
from sluice.wire.requests import Extras, Submit
from sluice.wire.tables import Image, PromptTables, SharedTables, Table
from sluice.wire.tensors import LOGITS_NAMES, TensorParams

NO_BEAMS = Fault(
    ErrorCode.NOT_BUILT_YET.name,
    "is not built yet for engines with a custom scheduler or a capacity_scheduler_policy other than max_utilization",
    field="spec.sampling.beam_search",
)
NO_CHUNKS = Fault(
    ErrorCode.NOT_BUILT_YET.name,
    "tensors of the prompt are not built yet for engines without chunked_context, which compute a prompt in one step",
    field="spec.output",
)
NO_ADAPTERS = Fault(
    ErrorCode.INVALID_ARGUMENT.name,
    "names an adapter, but this engine serves no adapters: see its setting lora",
    field="spec.lora_id",
)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The limits and abilities of an engine that decide which requests it accepts."""

    fingerprint: str
    """Fingerprint of the model as computed here; the root of all block hashes."""
    vocab_size: int
    max_sequence_tokens: int
    """Limit on prompt plus output: the model's context or the tokens that the block pool holds, whichever is less."""
    max_requests: int
    processors: frozenset[str] = frozenset()
    """Names of the logits processors."""
    tensors: frozenset[str] = frozenset()
    """Names of the tensors that requests may name in addition to logits."""
    max_draft_tokens: int = 0
    """Default limit on draft tokens per sequence and step."""
    has_adapters: bool = False
    """Whether requests may name LoRA adapters."""
    hidden_size: int = 0
    """See `Runner`."""
    image_rows: int = 0
    """See `Runner`."""

    @property
    def offers(self) -> frozenset[Offer]:
        """Everything that this engine has and that a request may need."""
        return frozenset(
            [
                *([LORA] if self.has_adapters else []),
                *(offer("logits_processor", name) for name in self.processors),
                *(offer("tensor", name) for name in self.tensors),
                *([offer("prompt_rows", self.hidden_size)] if self.hidden_size else []),
                *([offer("image_rows", self.image_rows)] if self.image_rows else []),
            ]
        )


def longest_sequence(runner: Runner, batching: Batching, max_context: int) -> int:
    """Tokens of the longest sequence: `max_context` of the model, or fewer if the runner's blocks hold fewer."""
    geometry = Geometry.fit(runner.num_blocks, runner.tokens_per_block, runner.window, batching.chunk)
    longest = geometry.longest(runner.num_blocks)
    return max_context if longest is None else min(max_context, longest)


@dataclass(frozen=True, slots=True)
class Refusals:
    limits: EngineLimits
    tables: SharedTables[Table | Image]
    """Tables and images of live requests, which need not be hashed again."""
    beams: bool
    """Whether the scheduler supports beam search."""
    chunked: bool
    """Whether a prompt may be computed in several steps."""

    def fault_of(self, submit: Submit) -> Fault | None:
        """Why this engine cannot compute a request whose prompt and length are valid; None if it can."""
        fault = invalid(resume_problem(submit, self.limits.vocab_size)) if submit.resume or submit.ended else None
        if fault is None and submit.extras is not None:
            fault = self._extras_fault(submit, submit.extras)
        return fault or self._sampling_fault(submit)

    def _sampling_fault(self, submit: Submit) -> Fault | None:
        sampling = submit.sampling
        unknown = [name for name in sampling.logits_processors if name not in self.limits.processors]
        if unknown:
            return invalid(f"this engine has no logits processor {unknown[0]!r}")
        return NO_BEAMS if sampling.beam_search is not None and not self.beams else None

    def _extras_fault(self, submit: Submit, extras: Extras) -> Fault | None:
        vocab_size, drafted = self.limits.vocab_size, extras.speculation.draft_token_ids
        if drafted and not 0 <= min(drafted) <= max(drafted) < vocab_size:
            return invalid(f"draft token ids must be from 0 to {vocab_size - 1}")
        problem = proposals_problem(extras.speculation, submit.sampling, vocab_size)
        if problem is not None:
            return invalid(problem, "spec.speculation.draft_logits.data")
        if extras.tensors is not None:
            problem = rows_problem(submit, extras.tensors)
        if problem is None and extras.tables is not None:
            problem = self._tables_problem(submit, extras, extras.tables)
        if problem is not None:
            return invalid(problem)
        if extras.adapter is not None and not self.limits.has_adapters:
            return NO_ADAPTERS
        return None if extras.tensors is None else self._tensors_fault(submit, extras.tensors)

    def _tensors_fault(self, submit: Submit, tensors: TensorParams) -> Fault | None:
        names = tensors.context + tensors.output
        if names and submit.sampling.beam_search is not None:
            return invalid("tensors cannot be combined with beam search")
        absent = [name for name in names if name not in (*LOGITS_NAMES, *self.limits.tensors)]
        if absent:
            return invalid(f"this engine has no tensor {absent[0]!r}")
        return NO_CHUNKS if tensors.context and not self.chunked else None

    def _tables_problem(self, submit: Submit, extras: Extras, tables: PromptTables) -> str | None:
        if not tables:
            return "extra_ids must be empty without tables" if tables.extra_ids else None
        problem = self._table_problem(tables) or self._image_problem(tables)
        if problem is not None:
            return problem
        if tables.extra_ids and len(tables.extra_ids) != len(submit.prompt):
            return f"extra_ids must have {len(submit.prompt)} ids, one per prompt token (got {len(tables.extra_ids)})"
        if extras.prompt_logprobs is not None:
            return "prompt_logprobs cannot be combined with tables or images: virtual tokens have no probability"
        return None

    def _table_problem(self, given: PromptTables) -> str | None:
        hidden_size = self.limits.hidden_size
        if given.tables and not hidden_size:
            return "this engine does not support prompt tables or embeddings with this model"
        for i, table in enumerate(given.tables):
            if table.hidden_size != hidden_size:
                return f"table {i} must have rows of the model's hidden size, {hidden_size} (got {table.hidden_size})"
            if not self.tables.knows(table) and not table.intact:
                return f"table {i} does not match its digest"
        return None

    def _image_problem(self, given: PromptTables) -> str | None:
        image_rows = self.limits.image_rows
        if given.images and not image_rows:
            return "this engine does not support images with this model"
        for i, image in enumerate(given.images):
            # The rows of a grid depend on the size of the picture, which is checked when they are computed.
            if not image.columns and image.rows != image_rows:
                return f"image {i} must have {image_rows} rows (got {image.rows})"
            if not self.tables.knows(image) and not image.intact:
                return f"image {i} does not match its digest"
        return None


def rows_problem(submit: Submit, tensors: TensorParams) -> str | None:
    for index, rows in tensors.output_rows.items():
        if rows > len(submit.resume.get(index, ())):
            return f"tensors must have at most as many rows as resume has tokens (got {rows} for sequence {index})"
    if tensors.context_rows > len(submit.prompt):
        return f"tensors must have at most {len(submit.prompt)} rows of the prompt (got {tensors.context_rows})"
    return None


def resume_problem(submit: Submit, vocab_size: int) -> str | None:
    for name, indexes in (("resume", submit.resume), ("ended", submit.ended)):
        unknown = [index for index in indexes if not 0 <= index < submit.n]
        if unknown:
            return f"{name} must name sequences from 0 to {submit.n - 1} (got {unknown[0]})"
    if not submit.remaining:
        return f"ended must not name all of the {submit.n} sequences"
    if submit.extras is not None and submit.extras.prompt_logprobs is not None and any(submit.resume.values()):
        return "prompt_logprobs must be unset where resume has tokens: they have been delivered before these"
    max_tokens = submit.stopping.max_tokens
    for index, tokens in submit.resume.items():
        if len(tokens) > max_tokens:
            return f"resume must have at most {max_tokens} (max_tokens) tokens (got {len(tokens)} for sequence {index})"
        invalid = [token for token in tokens if not 0 <= token < vocab_size]
        if invalid:
            return f"resume token ids must be from 0 to {vocab_size - 1} (got {invalid[0]} in sequence {index})"
    return None


def invalid(problem: str | None, field: str = "") -> Fault | None:
    """None if there is no problem."""
    return None if problem is None else Fault(ErrorCode.INVALID_ARGUMENT.name, problem, field)
