"""Admits requests to the core, applies stops, and tracks requests that are being prepared."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import msgspec
from msgspec.structs import replace

from engine_worker.core.live import LiveRequests
from engine_worker.core.problems import resume_problem, rows_problem, tables_problem
from engine_worker.core.quarantine import QUARANTINED, Quarantine
from engine_worker.hooks import Stop
from engine_worker.kvcache.pool import Geometry
from engine_worker.positions import Positions, SplitImageError
from engine_worker.protocol import Preparation, Runner
from engine_worker.recompute import Recompute
from engine_worker.request import Request, State
from engine_worker.speculative.proposals import proposals_problem
from engine_worker.step import SequenceRules
from sluice.checkpoint.folder import Checkpoint
from sluice.settings.engine import Batching
from sluice.wire.errors import ErrorCode, Fault, FinishReason
from sluice.wire.hashing import root_hash
from sluice.wire.message import MAX_SEQUENCES
from sluice.wire.offers import LORA, Offer, offer
from sluice.wire.requests import Submit
from sluice.wire.tables import VirtualTokens
from sluice.wire.tensors import LOGITS_NAMES, TensorParams

MakeRules = Callable[[Submit], Sequence[SequenceRules | None]]


class Prepare(Protocol):
    """See `Runner.prepare`."""

    def __call__(self, spec: Submit, *, running: bool = False) -> Preparation | None: ...


MAX_LIVE_TABLE_BYTES = 512 << 20
"""Limit on all prompt tables and images of live requests; equal ones count once."""
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
EXPECTED_DRAFTS = 8
"""Draft tokens per sequence and step of a request that brings draft tokens and does not set max_draft_tokens."""


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
        """What requests may need and this engine has."""
        return frozenset(
            [
                *([LORA] if self.has_adapters else []),
                *(offer("logits_processor", name) for name in self.processors),
                *(offer("tensor", name) for name in self.tensors),
                *([offer("prompt_rows", self.hidden_size)] if self.hidden_size else []),
                *([offer("image_rows", self.image_rows)] if self.image_rows else []),
            ]
        )

    def drafts(self, spec: Submit) -> int:
        """Limit on draft tokens per sequence and step; 0: no drafts."""
        # Processors must see only tokens of the output, a beam has no single token to compare a draft token with, and
        # tensors have one row per output token.
        if spec.sampling.logits_processors or spec.sampling.beam_search is not None or spec.tensors is not None:
            return 0
        requested = spec.speculation.max_draft_tokens
        if requested is not None:
            return requested
        return self.max_draft_tokens or (EXPECTED_DRAFTS if spec.speculation.draft_token_ids else 0)


def fingerprint(checkpoint: Checkpoint, weights: str, dtype: str, max_attention_window: tuple[int, ...]) -> str:
    """Identifies the model as this engine computes it, in hex. A stream may continue on any engine with the same
    fingerprint."""
    # Without device, attention backend, number of ranks and batch size, which only change the rounding: a stream may
    # move from a GPU to a CPU.
    parts = (checkpoint.fingerprint, weights, dtype, max_attention_window)
    return blake2b(msgspec.msgpack.encode(parts), digest_size=8, person=b"sluice-model").hexdigest()


def longest_sequence(runner: Runner, batching: Batching, max_context: int) -> int:
    """Tokens of the longest sequence: `max_context` of the model, or fewer if the runner's blocks hold fewer."""
    geometry = Geometry.fit(runner.num_blocks, runner.tokens_per_block, runner.window, batching.chunk)
    longest = geometry.longest(runner.num_blocks)
    return max_context if longest is None else min(max_context, longest)


class Intake:
    def __init__(
        self,
        live: LiveRequests,
        limits: EngineLimits,
        prepare: Prepare,
        logit_rules: MakeRules,
        aging_seconds: float = 0.0,
        *,
        beams: bool = True,
        chunked: bool = True,
        recompute: Recompute | None = None,
    ) -> None:
        """`prepare`, `logit_rules`: see `Runner`. `aging_seconds`: time in which a waiting request gains one priority
        class; 0: never. `beams`: whether the scheduler supports beam search. `chunked`: whether a prompt may be
        computed in several steps. `recompute`: see `Request`."""
        self.unknown_stops = 0
        """Stops since the start that matched no live request or sequence."""
        self.quarantine = Quarantine(live)
        self._live = live
        self._limits = limits
        self._prepare = prepare
        self._logit_rules = logit_rules
        self._preparing: dict[Request, Preparation] = {}
        self._aging_seconds = aging_seconds
        self._beams = beams
        self._chunked = chunked
        self._recompute = recompute
        self._arrivals = 0

    @property
    def free_slots(self) -> int:
        return max(0, self._limits.max_requests - len(self._live.requests))

    def ingest(self, requests: Iterable[Submit], now: float) -> None:
        for spec in requests:
            fault = self._refusal(spec) or self._try_begin(spec, now)
            if fault is not None:
                self._live.refuse(spec, fault)
        self.quarantine.refresh()

    def _try_begin(self, spec: Submit, now: float) -> Fault | None:
        """Begin a valid request; returns a fault if its images or its preparation have a problem."""
        positions = None
        if spec.tables is not None:
            try:
                positions = Positions.of(spec.prompt, VirtualTokens.of(self._limits.vocab_size, spec.tables))
            except SplitImageError as error:
                return Fault(ErrorCode.INVALID_ARGUMENT.name, str(error))
        preparation = self._prepare(spec)
        if preparation is not None and preparation.poll():
            if preparation.fault is not None:
                return preparation.fault
            preparation = None
        self._begin(spec, positions, preparation, now)
        return None

    def _begin(self, spec: Submit, positions: Positions | None, preparation: Preparation | None, now: float) -> None:
        self._arrivals += 1
        virtual = None
        if spec.tables is not None:
            spec = replace(spec, tables=spec.tables.shared(self._live.tables.take))
            virtual = VirtualTokens.of(self._limits.vocab_size, spec.tables)
        root = root_hash(self._limits.fingerprint, *spec.domain)
        rules, drafts = self._logit_rules(spec), self._limits.drafts(spec)
        request = Request(
            spec,
            root,
            self._arrivals,
            now,
            self._aging_seconds,
            rules,
            drafts,
            virtual,
            positions,
            self._recompute,
        )
        if preparation is not None:
            self._preparing[request] = preparation
        # `alone`: an engine died while it ran this request.
        (self.quarantine if spec.alone else self._live).begin(request, now, held=preparation is not None)

    def hold(self, requests: Iterable[Request]) -> None:
        """Let live requests with postponed draws wait, without memory, until they are prepared. None of their sequences
        may be in flight."""
        for request in requests:
            if not request.num_live:
                continue
            for sequence in request.sequences:
                if sequence.state not in (State.AWAITING, State.ENDED):
                    self._live.park(sequence)
            preparation = self._prepare(request.spec, running=True)
            if preparation is None:
                self._live.admit(request)
            else:
                self._preparing[request] = preparation

    @property
    def preparing(self) -> bool:
        """Whether any request waits for its preparation."""
        return bool(self._preparing)

    def settle(self, now: float) -> None:
        """Admit or end the requests whose preparation has ended."""
        if not self._preparing:
            return
        # One call polls all preparations.
        for preparation in list(self._preparing.values())[:1]:
            preparation.poll()
        for request, preparation in list(self._preparing.items()):
            if request.num_live and not preparation.done:
                continue
            del self._preparing[request]
            if not preparation.done:
                preparation.withdraw()
            elif preparation.fault is not None:
                self._live.end_request(request, FinishReason.ERROR, now, fault=preparation.fault)
            else:
                self._live.admit(request)

    def stop(self, stops: Iterable[Stop], now: float) -> None:
        for number, attempt, index in stops:
            request = self._live.requests.get(number)
            if request is None or request.spec.attempt != attempt:
                self.unknown_stops += 1
            elif index is None:
                self._live.end_request(request, FinishReason.ABORTED, now)
            else:
                named = [sequence for sequence in request.sequences if sequence.index == index]
                self.unknown_stops += not named
                for sequence in named:
                    self._live.end(sequence, FinishReason.ABORTED, now)

    def _refusal(self, spec: Submit) -> Fault | None:
        limits = self._limits
        if spec.request in self._live.requests:
            return Fault(ErrorCode.DUPLICATE_REQUEST.name, "a request with this number is live on this engine")
        if self.quarantine.refresh() is not None:
            return QUARANTINED
        full = self._full(spec)
        if full is not None:
            return Fault(ErrorCode.OVERLOADED.name, full)
        if not 1 <= spec.n <= MAX_SEQUENCES:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, f"n must be from 1 to {MAX_SEQUENCES} (got {spec.n})")
        if not spec.prompt or spec.stopping.max_tokens < 1:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, "prompt must not be empty and max_tokens must be at least 1")
        last = limits.vocab_size + (0 if spec.tables is None else spec.tables.num_rows) - 1
        if min(spec.prompt) < 0 or max(spec.prompt) > last:
            # The router has checked ids from clients, so these ids come from the tokenizer.
            message = (
                f"prompt token ids must be from 0 to {last}: the tokenizer has tokens that the model does not have"
            )
            return Fault(ErrorCode.INVALID_ARGUMENT.name, message)
        total = len(spec.prompt) + spec.stopping.max_tokens
        if total > limits.max_sequence_tokens:
            return Fault(
                ErrorCode.CONTEXT_OVERFLOW.name,
                f"{len(spec.prompt)} prompt tokens plus {spec.stopping.max_tokens} max_tokens are {total}; "
                f"this engine holds at most {limits.max_sequence_tokens} per sequence",
            )
        return self._feature_fault(spec) or self._unable(spec)

    def _feature_fault(self, spec: Submit) -> Fault | None:
        """Why what the request asks of optional features is invalid."""
        vocab_size, drafted = self._limits.vocab_size, spec.speculation.draft_token_ids
        if drafted and not 0 <= min(drafted) <= max(drafted) < vocab_size:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, f"draft token ids must be from 0 to {vocab_size - 1}")
        if spec.speculation.draft_logits is not None:
            problem = proposals_problem(spec, vocab_size)
            if problem is not None:
                return Fault(ErrorCode.INVALID_ARGUMENT.name, problem, field="spec.speculation.draft_logits.data")
        problem = resume_problem(spec, vocab_size) if spec.resume or spec.ended else None
        if problem is None and spec.tensors is not None:
            problem = rows_problem(spec, spec.tensors)
        if problem is None and spec.tables is not None:
            sizes = self._limits.hidden_size, self._limits.image_rows
            problem = tables_problem(spec, spec.tables, *sizes, self._live.tables)
        return None if problem is None else Fault(ErrorCode.INVALID_ARGUMENT.name, problem)

    def _full(self, spec: Submit) -> str | None:
        if not self.free_slots:
            return f"the engine has reached its limit of {self._limits.max_requests} requests (max_requests)"
        if (
            spec.tables is not None
            and (size := self._live.tables.num_bytes_with(spec.tables.parts)) > MAX_LIVE_TABLE_BYTES
        ):
            limit = f"the limit is {MAX_LIVE_TABLE_BYTES}"
            return f"prompt tables and images of live requests would have {size} bytes, {limit}"
        return None

    def _unable(self, spec: Submit) -> Fault | None:
        """Refuses what this engine does not support, though others may."""
        if spec.adapter is not None and not self._limits.has_adapters:
            return NO_ADAPTERS
        unknown = [name for name in spec.sampling.logits_processors if name not in self._limits.processors]
        if unknown:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, f"this engine has no logits processor {unknown[0]!r}")
        if spec.sampling.beam_search is not None and not self._beams:
            return NO_BEAMS
        return None if spec.tensors is None else self._unable_tensors(spec, spec.tensors)

    def _unable_tensors(self, spec: Submit, tensors: TensorParams) -> Fault | None:
        names = tensors.context + tensors.output
        if names and spec.sampling.beam_search is not None:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, "tensors cannot be combined with beam search")
        absent = [name for name in names if name not in (*LOGITS_NAMES, *self._limits.tensors)]
        if absent:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, f"this engine has no tensor {absent[0]!r}")
        return NO_CHUNKS if tensors.context and not self._chunked else None
