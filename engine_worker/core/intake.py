"""Admits requests to the core, applies stops, and tracks requests that are being prepared."""

from collections.abc import Iterable

from msgspec.structs import replace

from engine_worker.core.live import LiveRequests
from engine_worker.core.quarantine import QUARANTINED, Quarantine
from engine_worker.core.refusals import EngineLimits, Refusals, invalid
from engine_worker.hooks import Stop
from engine_worker.kvcache.fetches import Fetch, Fetches
from engine_worker.positions import Positions, SplitImageError
from engine_worker.protocol import Preparation, Runner
from engine_worker.recompute import Recompute
from engine_worker.request import Request, State
from sluice.wire.errors import ErrorCode, Fault, FinishReason
from sluice.wire.hashing import root_hash
from sluice.wire.message import MAX_SEQUENCES
from sluice.wire.requests import NO_EXTRAS, Submit
from sluice.wire.tables import VirtualTokens

MAX_LIVE_TABLE_BYTES = 512 << 20
"""Limit on all prompt tables and images of live requests; equal ones count once."""

EXPECTED_DRAFTS = 8
"""Draft tokens per sequence and step of a request that brings draft tokens and does not set max_draft_tokens."""


class Intake:
    def __init__(
        self,
        live: LiveRequests,
        limits: EngineLimits,
        runner: Runner,
        aging_seconds: float,
        *,
        beams: bool,
        chunked: bool,
        recompute: Recompute | None,
        fetches: Fetches | None = None,
    ) -> None:
        """`aging_seconds`: time in which a waiting request gains one priority class; 0: never. `beams`: whether the
        scheduler supports beam search. `chunked`: whether a prompt may be computed in several steps. `recompute`: see
        `Request`. `fetches`: None: nothing is copied from other engines."""
        self.unknown_stops = 0
        """Stops since the start that matched no live request or sequence."""
        self.quarantine = Quarantine(live)
        self._live = live
        self._limits = limits
        self._runner = runner
        self._preparing: dict[Request, Preparation] = {}
        self._fetches = fetches
        self._fetching: dict[Request, Fetch] = {}
        """Requests whose blocks are being copied from other engines."""
        self._aging_seconds = aging_seconds
        self._refusals = Refusals(limits, live.tables, beams, chunked)
        self._recompute = recompute
        self._arrivals = 0

    @property
    def free_slots(self) -> int:
        return max(0, self._limits.max_requests - len(self._live.requests))

    def ingest(self, requests: Iterable[Submit], now: float) -> None:
        for submit in requests:
            fault = self._refusal(submit) or self._try_begin(submit, now)
            if fault is not None:
                self._live.refuse(submit, fault)
        self.quarantine.refresh()

    def _try_begin(self, submit: Submit, now: float) -> Fault | None:
        """Begin a valid request; returns a fault if its images or its preparation have a problem."""
        positions, extras = None, submit.extras
        if extras is not None and extras.tables is not None:
            try:
                positions = Positions.of(submit.prompt, VirtualTokens.of(self._limits.vocab_size, extras.tables))
            except SplitImageError as error:
                return invalid(str(error))
        preparation = self._runner.prepare(submit)
        if preparation is not None and preparation.poll():
            if preparation.fault is not None:
                return preparation.fault
            preparation = None
        self._begin(submit, positions, preparation, now)
        return None

    def _begin(self, submit: Submit, positions: Positions | None, preparation: Preparation | None, now: float) -> None:
        self._arrivals += 1
        virtual, extras = None, submit.extras
        if extras is not None and extras.tables is not None:
            tables = extras.tables.shared(self._live.tables.take)
            submit = replace(submit, extras=replace(extras, tables=tables))
            virtual = VirtualTokens.of(self._limits.vocab_size, tables)
        root = root_hash(self._limits.fingerprint, submit.salt, submit.adapter_version or "")
        rules, drafts = self._runner.logit_rules(submit), self._drafts(submit)
        request = Request(
            submit,
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
        fetch = None if self._fetches is None else self._fetches.begin(request.waiting(), _keepers(submit))
        if fetch is not None:
            self._fetching[request] = fetch
        held = preparation is not None or fetch is not None
        # `alone`: an engine died while it ran this request.
        (self.quarantine if submit.alone else self._live).begin(request, now, held=held)

    def hold(self, requests: Iterable[Request]) -> None:
        """Let live requests with postponed draws wait, without memory, until they are prepared. None of their sequences
        may be in flight."""
        for request in requests:
            if not request.num_live:
                continue
            for sequence in request.sequences:
                if sequence.state not in (State.AWAITING, State.ENDED):
                    self._live.park(sequence)
            preparation = self._runner.prepare(request.submit, running=True)
            if preparation is None:
                self._live.admit(request)
            else:
                self._preparing[request] = preparation

    @property
    def preparing(self) -> bool:
        """Whether any request waits for its preparation or its blocks."""
        return bool(self._preparing or self._fetching)

    def settle(self, now: float) -> None:
        """Admit or end the requests whose preparation has ended, and admit those whose blocks have arrived."""
        if self._fetches is not None and self._fetches:
            self._settle_fetches(self._fetches)
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
            elif request not in self._fetching:
                self._live.admit(request)

    def _settle_fetches(self, fetches: Fetches) -> None:
        fetches.publish()
        for request, fetch in list(self._fetching.items()):
            if fetch.done or not request.num_live:
                del self._fetching[request]
                if request.num_live and request not in self._preparing:
                    self._live.admit(request)

    def stop(self, stops: Iterable[Stop], now: float) -> None:
        for number, attempt, index in stops:
            request = self._live.requests.get(number)
            if request is None or request.submit.attempt != attempt:
                self.unknown_stops += 1
            elif index is None:
                self._live.end_request(request, FinishReason.ABORTED, now)
            else:
                named = [sequence for sequence in request.sequences if sequence.index == index]
                self.unknown_stops += not named
                for sequence in named:
                    self._live.end(sequence, FinishReason.ABORTED, now)

    def _refusal(self, submit: Submit) -> Fault | None:
        if submit.request in self._live.requests:
            return Fault(ErrorCode.DUPLICATE_REQUEST.name, "a request with this number is live on this engine")
        if self.quarantine.refresh() is not None:
            return QUARANTINED
        full = self._full(submit)
        if full is not None:
            return Fault(ErrorCode.OVERLOADED.name, full)
        fault = self._prompt_fault(submit)
        return self._refusals.fault_of(submit) if fault is None and not _is_plain(submit) else fault

    def _full(self, submit: Submit) -> str | None:
        if not self.free_slots:
            return f"the engine has reached its limit of {self._limits.max_requests} requests (max_requests)"
        tables = None if submit.extras is None else submit.extras.tables
        if tables is not None and (size := self._live.tables.num_bytes_with(tables.parts)) > MAX_LIVE_TABLE_BYTES:
            limit = f"the limit is {MAX_LIVE_TABLE_BYTES}"
            return f"prompt tables and images of live requests would have {size} bytes, {limit}"
        return None

    def _prompt_fault(self, submit: Submit) -> Fault | None:
        if not 1 <= submit.n <= MAX_SEQUENCES:
            return invalid(f"n must be from 1 to {MAX_SEQUENCES} (got {submit.n})")
        if not submit.prompt or submit.stopping.max_tokens < 1:
            return invalid("prompt must not be empty and max_tokens must be at least 1")
        tables = None if submit.extras is None else submit.extras.tables
        last = self._limits.vocab_size + (0 if tables is None else tables.num_rows) - 1
        if min(submit.prompt) < 0 or max(submit.prompt) > last:
            # The router has checked ids from clients, so these ids come from the tokenizer.
            return invalid(
                f"prompt token ids must be from 0 to {last}: the tokenizer has tokens that the model does not have"
            )
        total = len(submit.prompt) + submit.stopping.max_tokens
        if total > self._limits.max_sequence_tokens:
            return Fault(
                ErrorCode.CONTEXT_OVERFLOW.name,
                f"{len(submit.prompt)} prompt tokens plus {submit.stopping.max_tokens} max_tokens are {total}; "
                f"this engine holds at most {self._limits.max_sequence_tokens} per sequence",
            )
        return None

    def _drafts(self, submit: Submit) -> int:
        """Limit on draft tokens per sequence and step; 0: no drafts."""
        sampling, extras = submit.sampling, submit.extras or NO_EXTRAS
        # Processors must see only tokens of the output, a beam has no single token to compare a draft token with, and
        # tensors have one row per output token.
        if sampling.logits_processors or sampling.beam_search is not None or extras.tensors is not None:
            return 0
        requested = extras.speculation.max_draft_tokens
        if requested is not None:
            return requested
        return self._limits.max_draft_tokens or (EXPECTED_DRAFTS if extras.speculation.draft_token_ids else 0)


def _keepers(submit: Submit) -> list[str]:
    """Keepers that may have blocks of the request."""
    return [] if submit.extras is None else submit.extras.kv_keepers


def _is_plain(submit: Submit) -> bool:
    """Whether the request neither uses optional features nor resumes an earlier attempt."""
    sampling = submit.sampling
    has_options = bool(sampling.logits_processors) or sampling.beam_search is not None or submit.extras is not None
    return not (has_options or submit.resume or submit.ended)
