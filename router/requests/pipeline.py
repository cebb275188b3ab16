"""The front door: every generation, unary or stream, goes through `RequestPipeline.serve` on its way in and out."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import structlog

from router.access.principal import Principal
from router.errors import RequestError
from router.requests.admission import Admission
from router.requests.counters import RequestCounters
from router.requests.dispatcher import Dispatcher
from router.requests.registry import Requests, RequestState
from router.text.tokenizer_pool import Text
from router.validate.context import fit
from router.validate.limits import Limits
from router.validate.model import Model
from router.validate.spec import parse
from router.validate.violations import logged
from sluice.ring.errors import FinishReason
from sluice.v1 import generation_pb2

MAX_LOGGED_FIELDS = 8


class RequestPipeline:
    """validate → tokenize → admit → place → dispatch, then the caller's answer, then one line in the log."""

    def __init__(
        self,
        model: Model,
        limits: Limits,
        text: Text,
        requests: Requests,
        admission: Admission,
        dispatcher: Dispatcher,
        tally: RequestCounters,
        logger: structlog.stdlib.BoundLogger,
    ) -> None:
        self._model = model
        self._limits = limits
        self._text = text
        self._requests = requests
        self._admission = admission
        self._dispatcher = dispatcher
        self._tally = tally
        self._logger = logger

    @asynccontextmanager
    async def serve(
        self, message: generation_pb2.GenerationSpec, caller: Principal, peer: str, streaming: bool
    ) -> AsyncIterator[RequestState]:
        """A request on the ring, or one that ended while it waited; whatever ends the body ends the request.

        Raises RequestError.
        """
        request_id, tenant = logged(message.request_id), caller.tenant
        try:
            spec = parse(message, self._model, self._limits, streaming)
            request_id = spec.request_id
            live = self._requests.enter(spec, tenant)
        except RequestError as error:
            refusal = _refusal(error, peer)
            outcome = error.code.name
            self._logger.info(
                "request", request_id=request_id, outcome=outcome, stream=streaming, tenant=tenant, **refusal
            )
            self._tally.refused(error.code.name, error.code.status)
            raise
        outcome = status = "CANCELLED"
        refusal = {}
        try:
            await self._bring_to_ring(live)
            yield live
            reasons, status = sorted({log.end.reason.name for log in live.log.sequences if log.end}), "OK"
            outcome = ",".join(reasons)
        except RequestError as error:
            outcome, status = error.code.name, error.code.status
            if live.suspicion.deaths:
                error.metadata["engine_deaths"] = str(live.suspicion.deaths)
            refusal = _refusal(error, peer)
            raise
        except Exception:
            outcome = status = "INTERNAL"
            raise
        finally:
            self._leave(live)
            self._report(live, outcome, refusal)
            self._tally.ended(live, "MIXED" if "," in outcome else outcome, status)

    async def abort(self, request_id: str, caller: Principal) -> bool:
        """Stop a live request; False where the caller has none."""
        live = self._requests.find(request_id)
        if live is None or not (caller.admin or caller.tenant == live.tenant):
            return False
        self._dispatcher.abort(live)
        return True

    async def _bring_to_ring(self, live: RequestState) -> None:
        live.queue = queue = asyncio.timeout(live.spec.time_limit)
        try:
            async with queue:
                await self._prepare(live)
        except TimeoutError:
            if not queue.expired():
                raise
        finally:
            live.queue = None
        if live.submitted is None:
            live.log.finish(FinishReason.ABORTED if live.aborted else FinishReason.TIME_LIMIT)

    async def _prepare(self, live: RequestState) -> None:
        self._admission.check(live.tenant)
        tokens = await self._text.tokens(live.spec.prompt)
        keep = live.spec.keep_prompt_tokens
        live.prompt = tokens if keep is None else tokens[-keep:]
        fit(live.spec, len(live.prompt), self._dispatcher.context_tokens)
        live.retention = live.spec.retention.params(len(tokens), len(live.prompt))
        context_tokens = len(live.prompt) + live.spec.resumed_tokens
        live.permit = await self._admission.acquire(live.spec.priority, context_tokens, live.tenant)
        await self._dispatcher.submit(live)

    def _leave(self, live: RequestState) -> None:
        live.log.close()
        self._dispatcher.leave(live)
        self._requests.leave(live)

    def _report(self, live: RequestState, outcome: str, refusal: dict[str, Any]) -> None:
        started = live.log.started
        now, first_token = time.monotonic(), live.first_token
        self._logger.info(
            "request",
            request_id=live.spec.request_id,
            outcome=outcome,
            stream=live.spec.streaming,
            tenant=live.tenant,
            n=live.spec.n,
            prompt_tokens=len(live.prompt),
            cached_tokens=started.cached_tokens if started else 0,
            completion_tokens=sum(log.received for log in live.log.sequences),
            undelivered_tokens=live.log.undelivered,
            attempts=live.attempts,
            seconds=round(now - live.arrived, 6),
            queue_seconds=round((live.submitted or now) - live.arrived, 6),
            first_token_seconds=None if first_token is None else round(first_token, 6),
            engine=live.engine,
            detokenizer=live.detokenizer,
            **refusal,
        )


def _refusal(error: RequestError, peer: str) -> dict[str, Any]:
    """Of the log line of a request that ends with an error: what is wrong with which fields, and who sent it."""
    fields = [violation.field for violation in error.violations[:MAX_LOGGED_FIELDS]]
    return {"fields": fields, "reason": logged(error.loggable), "peer": peer}
