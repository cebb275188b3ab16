"""What comes in: requests taken or refused, cancels carried out, everything else counted."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from structlog.stdlib import BoundLogger

from engine_worker.live import Live
from engine_worker.request import Request
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.hashing import root_hash
from sluice.ring.wire import Cancel, Submit

MAX_SEQUENCES = 128


@dataclass(frozen=True, slots=True)
class Terms:
    """What this engine is, and what it takes."""

    epoch: int
    fingerprint: str
    """Of the model folder: root of the block hashes."""
    vocab_size: int
    max_sequence_tokens: int
    """Longest prompt plus output: of the model's context and the block pool, the smaller."""
    max_requests: int


class Intake:
    """The engine's front door. `dropped` counts messages that got no answer, by reason."""

    def __init__(self, live: Live, terms: Terms, log: BoundLogger) -> None:
        self.dropped: Counter[str] = Counter()
        self.draining = False
        """Take no new request."""
        self._live = live
        self._terms = terms
        self._log = log
        self._arrivals = 0

    def take(self, messages: Iterable[Submit | Cancel], now: float) -> None:
        """Carry out what the routers asked for, in order."""
        for message in messages:
            if message.engine_epoch != self._terms.epoch:
                self._drop("other_epoch", message)
            elif isinstance(message, Submit):
                self._submit(message, now)
            else:
                self._cancel(message, now)

    def _submit(self, spec: Submit, now: float) -> None:
        held = self._live.requests.get(spec.request)
        if held is not None and held.spec.attempt == spec.attempt:
            # The attempt that lives owns the stream: rows of a refusal would end it at the receiver.
            self._drop("duplicate", spec)
            return
        if not 1 <= spec.n <= MAX_SEQUENCES:
            self._drop("invalid", spec)
            return
        try:
            fault = self._fault(spec)
            if fault is None:
                self._arrivals += 1
                root = root_hash(self._terms.fingerprint, spec.salt)
                self._live.begin(Request(spec, root, self._arrivals, now))
            else:
                self._log.info("refused", request_id=spec.name, code=fault.code, reason=fault.message)
                self._live.refuse(spec, fault)
        except ValueError:
            self._drop("bad_address", spec)

    def _cancel(self, message: Cancel, now: float) -> None:
        request = self._live.requests.get(message.request)
        if request is None or request.spec.attempt != message.attempt:
            self._drop("unknown_cancel", message)
        elif message.sequence is None:
            self._live.end_request(request, FinishReason.ABORTED, now)
        elif 0 <= message.sequence < len(request.sequences):
            self._live.end(request.sequences[message.sequence], FinishReason.ABORTED, now)
        else:
            self._drop("unknown_cancel", message)

    def _fault(self, spec: Submit) -> Fault | None:
        """Why the request cannot be taken, if it cannot."""
        terms = self._terms
        if self.draining:
            return Fault(ErrorCode.DRAINING.name, "the engine is shutting down")
        if spec.request in self._live.requests:
            return Fault(ErrorCode.DUPLICATE_REQUEST.name, "another attempt at this request is live")
        if len(self._live.requests) >= terms.max_requests:
            return Fault(ErrorCode.OVERLOADED.name, f"the engine holds its {terms.max_requests} requests")
        if not spec.prompt or spec.stopping.max_tokens < 1:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, "prompt and max_tokens must not be empty")
        if min(spec.prompt) < 0 or max(spec.prompt) >= terms.vocab_size:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, f"prompt token ids must be from 0 to {terms.vocab_size - 1}")
        wanted = len(spec.prompt) + spec.stopping.max_tokens
        if wanted > terms.max_sequence_tokens:
            return Fault(
                ErrorCode.CONTEXT_OVERFLOW.name,
                f"{len(spec.prompt)} prompt tokens and {spec.stopping.max_tokens} max_tokens are {wanted}; "
                f"this engine holds at most {terms.max_sequence_tokens} per sequence",
            )
        return None

    def _drop(self, reason: str, message: Submit | Cancel) -> None:
        self.dropped[reason] += 1
        level = self._log.debug if reason == "unknown_cancel" else self._log.warning
        level("dropped", reason=reason, kind=type(message).__name__, request=message.request, attempt=message.attempt)
