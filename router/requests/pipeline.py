"""The life of a generation request in the router, unary or stream: `RequestPipeline.serve`."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from structlog.stdlib import BoundLogger

from router.access.principal import Principal
from router.errors import RequestError, Violations, logged
from router.parse.model import Limits, ServedModel
from router.parse.parse import parse
from router.parse.spec import fit
from router.peers.offers import Offers, check_needs
from router.requests.admission import Admission
from router.requests.dispatcher import Dispatcher
from router.requests.part import Feature, parse_parts
from router.requests.registry import RequestCounters, Requests
from router.requests.request_state import RequestState
from router.requests.trace import RequestTrace, trace_ended, trace_refused
from router.requests.trace_context import TraceContext, new_context, read_traceparent
from router.text.tokenizer_pool import TokenizerPool
from sluice.v1.generation_pb2 import GenerationSpec
from sluice.wire.errors import FinishReason
from sluice.wire.params import RetentionParams
from sluice.wire.tables import NO_TABLES

MAX_LOGGED_FIELDS = 8


@dataclass(frozen=True)
class RequestPipeline:
    """parse → tokenize → admit → place → dispatch; then the caller writes the response; then one log line."""

    _model: ServedModel
    _limits: Limits
    _text: TokenizerPool
    _requests: Requests
    _admission: Admission
    _dispatcher: Dispatcher
    _offers: Offers
    _features: tuple[Feature, ...]
    """The optional features of requests."""
    _counters: RequestCounters
    _log: BoundLogger
    _on_trace: Callable[[RequestTrace], None] | None = None
    """Called with the trace of each ended request; None if tracing is off."""

    @asynccontextmanager
    async def serve(
        self, message: GenerationSpec, caller: Principal, peer: str, streaming: bool, traceparent: str = ""
    ) -> AsyncIterator[RequestState]:
        """Yields a request that is on the ring or has ended. Leaving the context ends the request. Raises RequestError.

        `traceparent`: the call's W3C Trace Context header.
        """
        trace = read_traceparent(traceparent) if traceparent else None
        if trace is None and self._on_trace:
            trace = new_context()
        request = await self._enter(message, caller, peer, streaming, trace)
        outcome = status = ""
        refusal: dict[str, Any] = {}
        try:
            with ExitStack() as during:
                for part in request.parts:
                    during.enter_context(part.during(request.log, request.interrupt_preparation))
                await self._bring_to_ring(request)
                yield request
            reasons = sorted({sequence.end.reason.name for sequence in request.log.sequences if sequence.end})
            outcome, status = ",".join(reasons), "OK"
        except BaseException as error:
            outcome, status = _outcome_of(error)
            refusal = _refusal(error, peer)
            if isinstance(error, RequestError) and request.suspicion.deaths:
                # The client passes the count to another router, so that a poison request is not retried from scratch
                # there.
                error.metadata["engine_deaths"] = str(request.suspicion.deaths)
            raise
        finally:
            # Close the log first: it tells the dispatcher that no further attempt is wanted.
            request.log.close()
            self._dispatcher.close_request(request)
            self._requests.remove(request)
            self._log_end(request, outcome, refusal)
            self._counters.on_ended(request, "MIXED" if "," in outcome else outcome, status)
            if self._on_trace is not None and request.trace is not None:
                self._on_trace(trace_ended(request, request.trace, self._model.name, outcome, status))

    async def abort(self, request_id: str, caller: Principal) -> bool:
        """Abort the caller's open request with this id. If it has none, an admin aborts those of all other tenants.
        False if nothing was aborted."""
        own = self._requests.find(request_id, caller.tenant)
        requests = [own] if own is not None else self._requests.find_all(request_id) if caller.admin else []
        for request in requests:
            self._dispatcher.abort(request)
        return bool(requests)

    async def _enter(
        self, message: GenerationSpec, caller: Principal, peer: str, streaming: bool, trace: TraceContext | None
    ) -> RequestState:
        """Validate and register a request. Raises RequestError. Logs and counts the calls that end here."""
        # The id is not validated yet, so shorten and escape it for the log.
        request_id, arrived = logged(message.request_id), time.monotonic()
        try:
            bad = Violations()
            parts = await parse_parts(self._features, message, self._model.name, bad, caller.tenant)
            spec = parse(message, self._model, self._limits, streaming, bad)
            bad.raise_if_any()
            request_id = spec.request_id
            return self._requests.add(spec, caller.tenant, trace, parts)
        except BaseException as error:
            outcome, status = _outcome_of(error)
            fields = {"outcome": outcome, "stream": streaming, "tenant": caller.tenant} | _refusal(error, peer)
            fields |= {} if trace is None else {"trace_id": trace.hex_id}
            self._log.info("request_ended", request_id=request_id, **fields)
            if self._on_trace is not None and trace is not None:
                self._on_trace(trace_refused(trace, arrived, self._model.name, request_id, outcome))
            self._counters.on_refused(outcome, status)
            raise

    async def _bring_to_ring(self, request: RequestState) -> None:
        """Submit the request within its time limit. If it is stopped or out of time before that, it ends here."""
        preparation = request.begin_preparation()
        try:
            async with preparation:
                await self._prepare(request)
        except TimeoutError:
            # A timeout other than the request's time limit is a bug.
            if not preparation.expired():
                raise
        if request.preparing:
            request.log.finish(FinishReason.ABORTED if request.aborted else FinishReason.TIME_LIMIT)
            request.end()

    async def _prepare(self, request: RequestState) -> None:
        spec = request.spec
        # Check before tokenizing: if the queue is full, the request would be refused afterwards in any case.
        self._admission.check(request.tenant)
        if request.needs:
            check_needs(request.needs, self._offers.known)
        tokens = await self._tokens(request)
        prompt = tokens if spec.keep_prompt_tokens is None else tokens[-spec.keep_prompt_tokens :]
        # Refuse a prompt that no engine can hold now, rather than after waiting in the queue. It is checked again at
        # the first submission, when it is known which engines qualify.
        fit(spec, len(prompt), self._offers.context_tokens, self._offers.model_context_tokens)
        sampling, retention = spec.sampling, RetentionParams()
        for part in request.parts:
            sampling = await part.sampling(sampling, request.tenant)
            retention = part.retention(retention, len(tokens), len(prompt))
        request.on_tokenized(prompt, sampling, retention)
        await self._load(request)
        context_tokens = len(prompt) + spec.resumed_tokens
        request.on_admitted(await self._admission.acquire(spec.priority, context_tokens, request.tenant))
        await self._dispatcher.submit(request)

    async def _tokens(self, request: RequestState) -> list[int]:
        """Ids of the whole prompt, before truncation. Raises RequestError."""
        tokens, first = await self._text.tokens(request.spec.prompt, request.tenant), self._model.vocab_size
        for part in request.parts:
            tokens, first = await part.place(tokens, first, request.tenant)
        return tokens

    async def _load(self, request: RequestState) -> None:
        """Load the rows of embeddings that ids of the prompt stand for. Raises RequestError."""
        tables = NO_TABLES
        for part in request.parts:
            tables = await part.load(tables, request.tenant)
        if tables:
            request.on_tables(tables.truncated(len(request.prompt)), self._model.vocab_size)

    def _log_end(self, request: RequestState, outcome: str, refusal: dict[str, Any]) -> None:
        started = request.log.started
        now, first_token = time.monotonic(), request.first_token_seconds
        self._log.info(
            "request_ended",
            **request.log_ids,
            outcome=outcome,
            stream=request.spec.streaming,
            tenant=request.tenant,
            n=request.spec.n,
            prompt_tokens=len(request.prompt),
            cached_tokens=started.cached_tokens if started else 0,
            completion_tokens=sum(sequence.received for sequence in request.log.sequences),
            undelivered_tokens=request.log.undelivered,
            attempts=request.attempts,
            seconds=round(now - request.arrived, 6),
            queue_seconds=round((request.submitted or now) - request.arrived, 6),
            first_token_seconds=None if first_token is None else round(first_token, 6),
            engine=request.engine,
            detokenizer=request.detokenizer,
            **({} if request.attempts < 2 else {"recomputed_tokens": request.recomputed_tokens}),
            **({} if request.prefill_engine is None else {"prefill_engine": request.prefill_engine}),
            **refusal,
        )


def _outcome_of(error: BaseException) -> tuple[str, str]:
    """Outcome and gRPC status of a call that ends with this exception."""
    if isinstance(error, RequestError):
        return error.code.name, error.code.status
    name = "INTERNAL" if isinstance(error, Exception) else "CANCELLED"
    return name, name


def _refusal(error: BaseException, peer: str) -> dict[str, Any]:
    """Fields for the log line of a failed request: the invalid fields, the reason, the client's address."""
    if not isinstance(error, RequestError):
        return {}
    fields = [violation.field for violation in error.violations[:MAX_LOGGED_FIELDS]]
    return {"fields": fields, "reason": logged(error.loggable), "peer": peer}
