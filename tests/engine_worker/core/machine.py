"""The whole engine except its model and its sockets, as a hypothesis state machine.

The rules submit and cancel requests, send next attempts, run steps, inject failures, let time pass and fill lanes, in
any order. After each rule the engine's accounting balances, blocks hold the tokens that the prefix cache says they
hold, routers and readers of KV cache events can reconstruct the cache, and outputs are those of the oracle. At the end,
every sequence has ended as it should.

- `machine_inputs`: what the rules draw from; `machine_requests`: how requests are built from it
- `machine_oracle`: the expected results
- `machine_checks`: the comparison
"""

from random import Random

import structlog
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from sluice.settings.engine import SchedulerNames
from sluice.wire.tables import NO_TABLES
from sluice.wire.tensors import NO_TENSORS
from tests.engine_worker.core.machine_checks import FailOnWarning, OutcomeChecks, RouterView, require_growth
from tests.engine_worker.core.machine_inputs import ADAPTER_PAGES, ENGINES, LANES, RANDOM_CHOICES, REQUESTS
from tests.engine_worker.core.machine_oracle import Oracle
from tests.engine_worker.core.machine_requests import resuming, speculation_for, with_virtual_tokens
from tests.fakes.adapters import ScriptedAdapters
from tests.fakes.cache_follower import CacheFollower, contents
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.submits import extras_of, with_extras

QUIET = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(50))
EVENT_BUFFER = 1 << 16
"""KV cache events to keep; more than any rule causes."""
MAX_FINAL_STEPS = 10_000
"""Bound of the steps until all requests have ended. A thousand is already unusual."""


class EngineMachine(RuleBasedStateMachine):
    """Rules are what can happen; invariants, and the bench's own checks, are what must hold after each."""

    def count(self, rules: int, engine_steps: int) -> None:
        """Hook for long runs, which report how much was done."""

    @initialize(**ENGINES)
    def start(self, policy, **options):
        self._begin(self._new_bench(policy=policy, **options), Oracle(), policy)

    def _new_bench(
        self,
        tokens,
        tokens_per_block,
        host,
        window,
        batch,
        budget,
        chunked,
        reuse,
        policy,
        chunking,
        aging,
        overlap,
        draft_batch=8,
        pages=3,
        draft_context=None,
        recompute="fast",
        folder=None,
        keepers=None,
    ):
        """`tokens`: size of the KV cache on the device; `host`: size of the host tier in relation to it."""
        num_blocks = tokens // tokens_per_block
        return EngineBench(
            num_blocks,
            tokens_per_block,
            batch,
            budget,
            chunked,
            reuse,
            max_requests=12,
            num_host_blocks=num_blocks * host,
            window=window,
            overlap=overlap,
            log=QUIET,
            context_chunking_policy=chunking,
            schedulers=SchedulerNames(policy),
            priority_aging_seconds=aging,
            max_draft_batch=draft_batch,
            kv_event_buffer=EVENT_BUFFER,
            adapters=ScriptedAdapters(pages, ADAPTER_PAGES),
            draft_context=draft_context,
            exact=recompute != "fast",
            separates=recompute == "together",
            folder=folder,
            keepers=keepers,
        )

    def _begin(self, bench: EngineBench, oracle: Oracle, policy: str) -> None:
        self.bench = bench
        self.oracle = oracle
        bench.engine._scheduler._warnings._log = FailOnWarning()
        self.may_preempt = policy == "max_utilization"
        if not self.may_preempt:
            require_growth(bench.cache)
        self.checks = OutcomeChecks(bench, oracle, may_preempt=self.may_preempt)
        self.failures = 0
        """The runner's failures up to the latest step."""
        self.allowed_preemptions = 0
        """Preemptions up to the latest failed step. Policies that never preempt do so only after such a step."""
        self.routers = [RouterView(), RouterView()]
        self.follower = CacheFollower()

    @rule(**REQUESTS)
    def submit(
        self,
        base,
        shared,
        suffix,
        ends,
        lane,
        copies,
        resume=None,
        drafts=0,
        wrong_every=0,
        with_logits=False,
        threshold=None,
        **options,
    ):
        """Several requests that differ in their seed. `resume`: makes them resume from a random state."""
        prompt = base[:shared] + suffix
        if rows := options.get("tables", NO_TABLES).num_rows:
            prompt = with_virtual_tokens(prompt, rows, shared % 7)
        options = self._combinable(options, resumes=resume is not None)
        speculates = options.get("beams") is None and (drafts or with_logits)
        for _ in range(copies):
            number = len(self.bench.specs) + 1
            spec = spec_of(
                prompt,
                request=number,
                seed=number,
                detokenizer=lane,
                eos_token_ids=ends[::2],
                stop_token_ids=ends[1::2],
                **options,
            )
            if speculates:
                speculation = speculation_for(self.oracle, spec, drafts, wrong_every, with_logits, threshold)
                spec = with_extras(spec, speculation=speculation)
            self.bench.send(spec if resume is None else resuming(self.oracle, spec, resume))
            if options["time_limit"] is not None:
                self.checks.disturbed.add(number)

    @precondition(lambda self: self.bench.specs)
    @rule(choices=RANDOM_CHOICES, lane=st.sampled_from(LANES))
    def next_attempt(self, choices, lane):
        """Sent whether or not the former attempt has ended, and resuming from any part of its output."""
        number = self._recent_request(choices)
        former = max(spec.attempt for spec in self.bench.specs.values() if spec.request == number)
        spec = replace(self.bench.specs[number, former], attempt=former + 1, detokenizer=lane)
        from_the_start = extras_of(spec).prompt_logprobs is not None and choices.random() < 0.5
        self.bench.send(
            spec if from_the_start else resuming(self.oracle, with_extras(spec, prompt_logprobs=None), choices)
        )
        self.checks.superseded.add((number, former))

    @precondition(lambda self: self.bench.specs)
    @rule(choices=RANDOM_CHOICES, one_sequence=st.booleans())
    def cancel(self, choices, one_sequence):
        number, attempt = choices.choice(sorted(self.bench.specs)[-6:])
        sequence = choices.randrange(self.bench.specs[number, attempt].n + 1) if one_sequence else None
        self.bench.cancel(number, sequence, attempt=attempt)
        self.checks.disturbed.add(number)

    @precondition(lambda self: self.bench.specs)
    @rule(choices=RANDOM_CHOICES)
    def draw_fails(self, choices):
        number = self._recent_request(choices)
        seed = self.bench.specs[number, 0].sampling.seed
        self.bench.runner.faults.add((seed, choices.randrange(self.bench.specs[number, 0].n)))

    @precondition(lambda self: self.bench.specs)
    @rule(choices=RANDOM_CHOICES, steps=st.integers(1, 3))
    def draws_are_postponed(self, choices, steps):
        self.bench.runner.unready.add(self._recent_request(choices))
        self._steps(steps)
        self.bench.runner.unready.clear()

    @rule(when=st.sampled_from([None, None, None, "before", "after", "load"]))
    def step_may_fail(self, when):
        self.bench.runner.fail = when
        self._steps(1)
        self.bench.runner.fail = None

    @rule()
    def drafting_will_fail(self):
        self.bench.runner.fail_drafting = True

    @rule()
    def moving_will_fail(self):
        self.bench.runner.fail_moving = True

    @rule(count=st.sampled_from([1, 2, 3, 5, 8]))
    def steps(self, count):
        self._steps(count)

    @rule(count=st.sampled_from([8, 15, 30]))
    def many_steps(self, count):
        self._steps(count)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds):
        self.bench.clock.now += seconds

    @rule(lane=st.sampled_from([*LANES, "mem://router"]), full=st.booleans())
    def lane_fills(self, lane, full):
        if lane in self.bench.receiver.lanes:
            self.bench.receiver.lanes[lane].full = full

    @rule(router=st.sampled_from([0, 1]))
    def router_reads_changes(self, router):
        self.routers[router].read_changes(self.bench)

    @rule()
    def flush(self):
        self.bench.engine.cache.flush()

    @invariant()
    def one_more_rule_was_carried_out(self):
        self.count(1, 0)

    @invariant()
    def outputs_are_right_so_far(self):
        if hasattr(self, "bench"):
            self.checks.check_outputs_so_far()

    @invariant()
    def events_say_what_is_in_the_cache(self):
        if hasattr(self, "bench"):
            self.follower.read(self.bench.cache.tiers.events)
            assert self.follower.blocks == contents(self.bench.cache.tiers)
            assert self.follower.dropped == 0

    def teardown(self):
        """Let everything end, then check how it ended and that nothing is left."""
        if not hasattr(self, "bench"):
            return
        for lane in self.bench.receiver.lanes.values():
            lane.full = False
        self.bench.runner.fail_moving = False
        for _ in range(MAX_FINAL_STEPS):
            bench = self.bench
            if not (bench.engine.live.requests or bench.inbox or bench.mailbox.waiting or bench.cache.copying):
                break
            self._steps(1)
        self.bench.run()
        self.outputs_are_right_so_far()
        self.events_say_what_is_in_the_cache()
        for router in self.routers:
            router.read_changes(self.bench)
        self.checks.check_ends()
        assert self.bench.cache.pool.available == self.bench.cache.pool.num_blocks
        assert self.bench.mailbox._submits == {}
        if self.bench.runner.adapters is not None:
            assert not +self.bench.runner.adapters.users, "adapters are still in use"

    def _recent_request(self, choices: Random) -> int:
        number, _ = choices.choice(sorted(self.bench.specs)[-6:])
        return number

    def _combinable(self, options: dict, *, resumes: bool) -> dict:
        """Without options that requests cannot have together, or that this engine does not support."""
        options = options.copy()
        if self.bench.runner.adapters is None:
            options.pop("adapter", None)
        if options.get("tables", NO_TABLES).num_rows or resumes:
            options.pop("prompt_logprobs", None)
        if options.get("beams") is not None:
            options["n"] = min(options["n"], options["beams"].width)
            options["tensors"] = NO_TENSORS
        if not self.bench.engine.intake._refusals.chunked and options.get("tensors", NO_TENSORS).context:
            options["tensors"] = NO_TENSORS
        return options

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step()
        self.count(0, count)

    def _step(self) -> None:
        ran, active = self.bench.step(), self.bench.engine.live.active
        waits = self.bench.cache.copying or any(sequence.gated for sequence in active)
        assert ran or not active or waits, "no sequence runs"
        self._note_failures()
        assert self.may_preempt or self.bench.cache.preemptions == self.allowed_preemptions, "a sequence was preempted"

    def _note_failures(self) -> None:
        """An injected failure may show later than in the step that it was requested for: when that is collected."""
        if self.bench.runner.failures > self.failures:
            self.failures = self.bench.runner.failures
            self.checks.disturbed |= {number for number, _ in self.bench.specs}
            self.allowed_preemptions = self.bench.cache.preemptions
