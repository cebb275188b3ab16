"""The engine's state of a request."""

from collections import abc
from math import inf

from engine_worker.beams import BeamSearch
from engine_worker.positions import Positions
from engine_worker.recompute import Recompute
from engine_worker.sequence import Sequence, State
from engine_worker.speculative.lookup import Lookup
from engine_worker.speculative.proposals import Proposals
from engine_worker.step import SequenceProgram
from sluice.wire.errors import FinishReason
from sluice.wire.params import RetentionParams, place_in_line
from sluice.wire.requests import Submit
from sluice.wire.rows import PROMPT_END_TOKENS, Open
from sluice.wire.tables import VirtualTokens
from sluice.wire.tensors import NO_TENSORS


class Request:
    """A submitted request with those of its n sequences that did not end in an earlier attempt.

    The first sequence without output computes the prompt; the others without output await it. A resumed sequence starts
    with output and is treated like one that was preempted after it.
    """

    def __init__(
        self,
        spec: Submit,
        root: bytes,
        number: int,
        now: float,
        aging_seconds: float = 0.0,
        programs: abc.Sequence[SequenceProgram | None] | None = None,
        max_drafts: int = 0,
        virtual: VirtualTokens | None = None,
        positions: Positions | None = None,
        recompute: Recompute | None = None,
    ) -> None:
        """`root`: parent hash of the first block. `number`: arrival number. `aging_seconds`: see `place_in_line`.
        `programs`: from `Runner.programs`; None: the request needs none. `max_drafts`: limit on draft tokens per
        sequence and step. `virtual`: ids of its tables and images. `positions`: see `Slice`.
        `recompute`: None: generated tokens are computed again like those of the prompt."""
        self.spec = spec
        self.root = root
        self.virtual = virtual
        self.positions = positions
        self.recompute = recompute
        self.num_prompt = len(spec.prompt)
        self.max_tokens = self.num_prompt + spec.stopping.max_tokens
        """Limit on prompt plus output of a sequence."""
        self.banned = spec.stopping.eos_token_ids + spec.stopping.stop_token_ids if spec.stopping.min_tokens else ()
        """Token ids that must not be sampled before min_tokens."""
        self.stops = frozenset(spec.stopping.eos_token_ids + spec.stopping.stop_token_ids)
        """Token ids that may end a sequence."""
        self.retention = spec.retention if spec.retention != RetentionParams() else None
        """How long to keep its blocks; None: the default."""
        self.arrived_at = now
        self.max_drafts = max_drafts
        self.lookup: Lookup | None = None
        """Lookup over the prompt and the caller's draft; created with the first drafter, shared by all."""
        self.proposals = None if spec.speculation.draft_logits is None else Proposals.of(spec)
        """The caller's draft tokens with logits; None: plain sampling."""
        self.adapter = None if spec.adapter is None else spec.adapter.version
        """Version of its LoRA adapter."""
        self.has_tensors = spec.tensors is not None
        self.tensors = NO_TENSORS if spec.tensors is None else spec.tensors
        self.num_scored = 0
        """Log-probabilities of the prompt that are among the responses."""
        self.num_context_rows = self.tensors.context_rows
        """Rows of the prompt's tensors that are among the responses."""
        self.deadline = inf if spec.time_limit is None else now + spec.time_limit
        beams = spec.sampling.beam_search
        self.search = None if beams is None else BeamSearch(beams, spec.stopping, spec.sampling.logprobs or 0)
        """Set for beam search: `sequences` are then the live beams, the best first. A later attempt starts the search
        again from the prompt, with the same result. None: tokens are sampled."""
        self.opened = False
        """Whether its Open is among the responses."""
        self.begun = False
        """Whether one of its sequences has held memory."""
        self.scheduled_at: float | None = None
        """When its first step was scheduled."""
        self.first_iteration = 0
        """Number of its first step."""
        self.cached_tokens = 0
        """Prompt tokens found in the prefix cache at its first step."""
        self.last_token_at: float | None = None
        self.preemptions = 0
        self.blocks_allocated = 0
        self.blocks_reused = 0
        """Blocks found in the prefix cache instead of allocated."""
        self.blocks_missed = 0
        """Full prompt blocks that were looked up in the prefix cache and not found."""
        place = place_in_line(spec.priority, now, aging_seconds)
        programs = programs or [None] * spec.n
        if self.search is not None:
            first = Sequence(self, 0, State.AWAITING, (place, number, 0), self.num_prompt, programs[0])
            self.sequences: tuple[Sequence, ...] = (first,)
        else:
            self.sequences = tuple(
                self._sequence(index, (place, number, index), programs[index]) for index in remaining(spec)
            )
        for computes_prompt in self.awaiting()[:1]:
            computes_prompt.state = State.WAITING
        self.num_live = len(self.sequences)
        """Sequences that have not ended."""

    @property
    def scoring(self) -> bool:
        """Whether log-probabilities of the prompt are still missing; then none of its sequences has output."""
        return self.spec.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1

    @property
    def prompt_rows_owner(self) -> Sequence | None:
        """The sequence that keeps the rows of the prompt's tensors: the first that has not ended."""
        return next((sequence for sequence in self.sequences if sequence.state is not State.ENDED), None)

    def awaiting(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.state is State.AWAITING]

    def _sequence(self, index: int, order: tuple[float, int, int], program: SequenceProgram | None) -> Sequence:
        output = list(self.spec.resume.get(index, ()))
        forced = output.pop() if self._lacks_rows(index, output) else None
        state = State.WAITING if output else State.AWAITING
        num_tokens = self.num_prompt + len(output)
        sequence = Sequence(self, index, state, order, num_tokens, program, None, output, len(output))
        sequence.num_rows, sequence.forced = self.tensors.output_rows.get(index, 0), forced
        return sequence

    def _lacks_rows(self, index: int, output: abc.Sequence[int]) -> bool:
        """Whether a resumed sequence is complete but rows of its tensors are missing."""
        tensors, stopping = self.tensors, self.spec.stopping
        if (
            not output
            or not self.has_tensors
            or stopping.finish_reason(output[-1], len(output)) is FinishReason.RUNNING
        ):
            return False
        missing = bool(tensors.output) and tensors.output_rows.get(index, 0) < len(output)
        return missing or (bool(tensors.context) and tensors.context_rows < self.num_prompt)


def remaining(spec: Submit) -> list[int]:
    """Indexes of the sequences that did not end in an earlier attempt."""
    ended = set(spec.ended)
    return [index for index in range(spec.n) if index not in ended]


def opening(spec: Submit, cached_tokens: int = 0, queue: float = 0.0) -> Open:
    """The request's Open. `queue`: seconds that it waited for its first step."""
    return Open(
        request=spec.request,
        attempt=spec.attempt,
        n=spec.n,
        text=spec.text,
        router=spec.router,
        prompt_tokens=len(spec.prompt),
        cached_tokens=cached_tokens,
        queue=queue,
        resume=spec.resume,
        ended=spec.ended,
        prompt_end=list(spec.prompt[-PROMPT_END_TOKENS:]),
    )
