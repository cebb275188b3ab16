"""Any order of submits, cancels, steps, failures and full lanes: the books balance, and every sequence ends right.

SLUICE_LONG=1 runs it for long.
"""

import os

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from sluice.ring.errors import FinishReason
from tests.fakes.engine import EngineBench

LONG = bool(os.environ.get("SLUICE_LONG"))
COMPLETE = {FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH}
BASE = [7 * i % 50 for i in range(40)]
LANES = ["mem://a", "mem://b"]


class EngineMachine(RuleBasedStateMachine):
    """The whole engine but its model and its sockets."""

    @initialize(
        num_blocks=st.integers(6, 24),
        tokens_per_block=st.integers(1, 5),
        batch=st.integers(1, 6),
        budget=st.integers(6, 24),
        chunked=st.booleans(),
        reuse=st.booleans(),
    )
    def start(self, num_blocks, tokens_per_block, batch, budget, chunked, reuse):
        self.bench = EngineBench(num_blocks, tokens_per_block, batch, budget, chunked, reuse, max_requests=12)
        self.disturbed: set[int] = set()
        """Requests that may end otherwise than by themselves."""
        self.checked: dict[tuple[int, int, int], int] = {}

    @rule(
        shared=st.integers(0, 40),
        own=st.lists(st.integers(0, 96), max_size=8),
        max_tokens=st.integers(1, 20),
        n=st.sampled_from([1, 1, 1, 2, 3, 9]),
        priority=st.integers(1, 3),
        salt=st.sampled_from(["", "", "x"]),
        ends=st.lists(st.integers(0, 96), max_size=12).map(tuple),
        min_tokens=st.integers(0, 4),
        time_limit=st.sampled_from([None, None, None, 0.0, 0.05, 0.3]),
        lane=st.sampled_from(LANES),
    )
    def submit(self, shared, own, max_tokens, n, priority, salt, ends, min_tokens, time_limit, lane):
        number = len(self.bench.specs) + 1
        self.bench.submit(
            BASE[:shared] + own,
            max_tokens,
            n=n,
            seed=number,
            priority=priority,
            salt=salt,
            time_limit=time_limit,
            detokenizer=lane,
            eos_token_ids=ends[::2],
            stop_token_ids=ends[1::2],
            min_tokens=min_tokens,
        )
        if time_limit is not None:
            self.disturbed.add(number)

    @precondition(lambda self: self.bench.specs)
    @rule(pick=st.randoms(use_true_random=False), one=st.booleans())
    def cancel(self, pick, one):
        number, _ = pick.choice(sorted(self.bench.specs)[-6:])
        sequence = pick.randrange(self.bench.specs[number, 0].n + 1) if one else None
        self.bench.cancel(number, sequence)
        self.disturbed.add(number)

    @precondition(lambda self: self.bench.specs)
    @rule(pick=st.randoms(use_true_random=False))
    def draw_fails(self, pick):
        number, _ = pick.choice(sorted(self.bench.specs)[-6:])
        self.bench.runner.faults.add((number, pick.randrange(self.bench.specs[number, 0].n)))
        self.disturbed.add(number)

    @rule(when=st.sampled_from(["before", "after"]))
    def step_fails(self, when):
        self.bench.runner.fail = when
        self.disturbed |= {number for number, _ in self.bench.specs}
        self.bench.step()
        self.bench.runner.fail = None

    @rule(count=st.integers(1, 12))
    def steps(self, count):
        for _ in range(count):
            self.bench.step()

    @rule(lane=st.sampled_from(LANES), full=st.booleans())
    def lane_fills(self, lane, full):
        if lane in self.bench.receiver.lanes:
            self.bench.receiver.lanes[lane].full = full

    @rule()
    def flush(self):
        self.bench.engine.flush_cache()

    @invariant()
    def outputs_are_right_so_far(self):
        if not hasattr(self, "bench"):
            return
        for key, stream in self.bench.receiver.streams.items():
            if self.checked.get(key, -1) < len(stream.tokens):
                expected = self.bench.expected(key[0], key[2])
                assert stream.tokens == expected[: len(stream.tokens)]
                self.checked[key] = len(stream.tokens)

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        for lane in self.bench.receiver.lanes.values():
            lane.full = False
        self.bench.run()
        self.outputs_are_right_so_far()
        assert self.bench.cache.pool.available == self.bench.cache.pool.num_blocks
        for (number, _), spec in self.bench.specs.items():
            for sequence in range(spec.n):
                self.ended_right(number, sequence)

    def ended_right(self, number: int, sequence: int) -> None:
        end = self.bench.stream(number, sequence).end
        assert end is not None
        if end.reason in COMPLETE:
            assert self.bench.output(number, sequence) == self.bench.expected(number, sequence)
        elif number not in self.disturbed:
            assert end.fault.code in ("CONTEXT_OVERFLOW", "OVERLOADED", "INVALID_ARGUMENT")


TestEngine = EngineMachine.TestCase
TestEngine.settings = settings(
    max_examples=5_000 if LONG else 60,
    stateful_step_count=80 if LONG else 40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
