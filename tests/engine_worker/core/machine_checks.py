"""Invariants of the engine's state machine after every rule: outputs, ends, and what routers know about the cache."""

from typing import Any, NoReturn

from engine_worker.kvcache.cache import KvCacheManager
from sluice.wire.errors import FinishReason
from sluice.wire.hashing import short_hash
from sluice.wire.requests import Submit
from sluice.wire.tensors import NO_TENSORS
from tests.engine_worker.core.machine_oracle import Oracle
from tests.fakes.engine import EngineBench
from tests.fakes.submits import extras_of

COMPLETE = {FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH, FinishReason.HANDED_OVER}
REFUSED = {"CONTEXT_OVERFLOW", "OVERLOADED", "INVALID_ARGUMENT"}


class RouterView:
    """A router that reads the changes of the prefix cache now and then."""

    def __init__(self) -> None:
        self._last_change = 0
        self._blocks: set[int] = set()
        """Short hashes of the blocks that the router believes to be cached."""

    def read_changes(self, bench: EngineBench) -> None:
        changes = bench.cache.tiers.journal.since(self._last_change)
        if changes is not None:
            assert changes.whole or changes.after == self._last_change
            known = set() if changes.whole else self._blocks
            self._blocks = known.difference(changes.removed).union(changes.stored)
            self._last_change = changes.last
        pools = (bench.cache.tiers.device, bench.cache.tiers.host)
        assert self._blocks == {short_hash(content.hash) for pool in pools for _, content in pool.contents()}


class FailOnWarning:
    """The log of a scheduler that must not report a problem."""

    def error(self, event: str, **_: Any) -> NoReturn:
        raise AssertionError(event)


def require_growth(cache: KvCacheManager) -> None:
    """From now on, a running sequence that needs another block must get it."""
    grow = cache._grow

    def must_grow(sequence) -> bool:
        assert grow(sequence), f"no blocks for {sequence}"
        return True

    cache._grow = must_grow


class OutcomeChecks:
    """Compares what receivers were sent with the oracle, considering cancels, time limits and failures."""

    def __init__(self, bench: EngineBench, oracle: Oracle, *, may_preempt: bool) -> None:
        self._bench = bench
        self._oracle = oracle
        self._may_preempt = may_preempt
        self.disturbed: set[int] = set()
        """Requests that may end early: cancelled, with a time limit, or affected by a failure."""
        self.superseded: set[tuple[int, int]] = set()
        """(request, attempt) for which a later attempt was sent."""
        self._checked: dict[tuple[int, int, int], int] = {}
        """Number of tokens checked, by request, attempt and sequence."""

    def check_outputs_so_far(self) -> None:
        for key, stream in self._bench.receiver.streams.items():
            if self._checked.get(key, -1) < len(stream.tokens):
                expected = self._oracle.output(self._bench.specs[key[:2]], key[2])
                assert stream.tokens == expected[: len(stream.tokens)]
                self._checked[key] = len(stream.tokens)

    def check_ends(self) -> None:
        """To be called once the engine is idle."""
        for spec in self._bench.specs.values():
            for sequence in spec.remaining:
                self._check_end(spec, sequence)

    def _check_end(self, spec: Submit, sequence: int) -> None:
        attempt = (spec.request, spec.attempt)
        # A real runner injects no failures.
        faults = getattr(self._bench.runner, "faults", ())
        end = self._bench.stream(spec.request, sequence, spec.attempt).end
        assert end is not None
        complete = end.reason in COMPLETE
        output = self._bench.output(spec.request, sequence, spec.attempt)
        self._check_prompt_logprobs(spec, has_output=bool(output))
        self._check_tensors(spec, sequence, complete=complete)
        if complete:
            assert output == self._oracle.output(spec, sequence)
        elif attempt in self.superseded and end.reason is FinishReason.ABORTED:
            pass
        elif not (spec.request in self.disturbed or any(seed == spec.sampling.seed for seed, _ in faults)):
            assert end.fault.code in REFUSED | (set() if self._may_preempt else {"NOT_BUILT_YET"})

    def _check_prompt_logprobs(self, spec: Submit, *, has_output: bool) -> None:
        attempt = (spec.request, spec.attempt)
        rows = self._bench.receiver.prompt_logprobs.get(attempt, [])
        if extras_of(spec).prompt_logprobs is None:
            assert not rows
        elif attempt in self._bench.receiver.opens:
            self._oracle.check_prompt_logprobs(spec, rows)
            assert len(rows) == len(spec.prompt) - 1 or not has_output

    def _check_tensors(self, spec: Submit, sequence: int, *, complete: bool) -> None:
        """All rows received are right, and none is missing from a complete sequence.

        Rows of the prompt may be missing if any sequence of the request ended early: it may have been the one that
        still had to compute them.
        """
        length = len(self._bench.output(spec.request, sequence, spec.attempt))
        tensors = extras_of(spec).tensors or NO_TENSORS
        for name in tensors.context:
            count = len(spec.prompt) - tensors.context_rows if self._all_complete(spec) else None
            self._check_tensor(spec, sequence, (0, name, True), count if complete else None)
        for name in tensors.output:
            count = max(0, length - tensors.output_rows.get(sequence, 0))
            self._check_tensor(spec, sequence, (sequence, name, False), count if complete else None)

    def _check_tensor(self, spec: Submit, sequence: int, tensor: tuple[int, str, bool], count: int | None) -> None:
        """`count`: the number of rows that must have been received; None: any number."""
        parts = self._bench.receiver.tensors.get((spec.request, spec.attempt, *tensor), [])
        assert count is None or sum(part.rows for part in parts) == count
        self._oracle.check_tensor_rows(spec, sequence, parts)

    def _all_complete(self, spec: Submit) -> bool:
        ends = [self._bench.stream(spec.request, sequence, spec.attempt).end for sequence in spec.remaining]
        return all(end is not None and end.reason in COMPLETE for end in ends)
