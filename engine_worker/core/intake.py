"""What comes in: requests taken or refused, stops carried out."""

from collections.abc import Iterable
from dataclasses import dataclass

from engine_worker.core.live import LiveRequests
from engine_worker.core.quarantine import REFUSAL, Quarantine
from engine_worker.hooks import Stop
from engine_worker.request import Request, remaining
from sluice.ring.errors import ErrorCode, Fault, FinishReason
from sluice.ring.hashing import root_hash
from sluice.ring.message import MAX_SEQUENCES
from sluice.ring.wire import Submit


@dataclass(frozen=True, slots=True)
class Terms:
    """What this engine is, and what it takes."""

    fingerprint: str
    """Of the model as it is computed here: root of the block hashes."""
    vocab_size: int
    max_sequence_tokens: int
    """Longest prompt plus output: of the model's context and the block pool, the smaller."""
    max_requests: int


class Intake:
    """The core's front door. `unknown_stops` counts those that named nothing that lives."""

    def __init__(self, live: LiveRequests, terms: Terms, aging_seconds: float = 0.0) -> None:
        """`aging_seconds`: in which a request that waits gains a priority class; 0: never."""
        self.unknown_stops = 0
        self.quarantine = Quarantine(live)
        self._live = live
        self._terms = terms
        self._aging_seconds = aging_seconds
        self._arrivals = 0

    @property
    def room(self) -> int:
        """Requests that would be taken now."""
        return max(0, self._terms.max_requests - len(self._live.requests))

    def take(self, requests: Iterable[Submit], now: float) -> None:
        """Begin these or refuse them."""
        for spec in requests:
            fault = self._fault(spec)
            if fault is None:
                self._arrivals += 1
                root = root_hash(self._terms.fingerprint, spec.salt)
                request = Request(spec, root, self._arrivals, now, self._aging_seconds)
                (self.quarantine if spec.alone else self._live).begin(request, now)
            else:
                self._live.refuse(spec, fault)
        self.quarantine.look()

    def stop(self, stops: Iterable[Stop], now: float) -> None:
        """End what these name."""
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

    def _fault(self, spec: Submit) -> Fault | None:
        """Why the request cannot be taken, if it cannot."""
        terms = self._terms
        if spec.request in self._live.requests:
            return Fault(ErrorCode.DUPLICATE_REQUEST.name, "a request with this number is live")
        if self.quarantine.look() is not None:
            return REFUSAL
        if not self.room:
            return Fault(ErrorCode.OVERLOADED.name, f"the engine holds its {terms.max_requests} requests")
        if not 1 <= spec.n <= MAX_SEQUENCES:
            return Fault(ErrorCode.INVALID_ARGUMENT.name, f"n must be from 1 to {MAX_SEQUENCES}, got {spec.n}")
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
        wrong = _wrong_resume(spec, terms.vocab_size)
        return None if wrong is None else Fault(ErrorCode.INVALID_ARGUMENT.name, wrong)


def _wrong_resume(spec: Submit, vocab_size: int) -> str | None:
    """What is wrong with what the request resumes from, if something is."""
    for name, indexes in (("resume", spec.resume), ("ended", spec.ended)):
        unknown = [index for index in indexes if not 0 <= index < spec.n]
        if unknown:
            return f"{name} must name sequences from 0 to {spec.n - 1}, got {unknown[0]}"
    if not remaining(spec):
        return f"ended must leave some of the {spec.n} sequences, got all of them"
    most = spec.stopping.max_tokens
    for index, tokens in spec.resume.items():
        if len(tokens) > most:
            return f"resume must have at most max_tokens, {most}, tokens, got {len(tokens)} of sequence {index}"
        strange = [token for token in tokens if not 0 <= token < vocab_size]
        if strange:
            return f"resume token ids must be from 0 to {vocab_size - 1}, got {strange[0]} in sequence {index}"
    return None
