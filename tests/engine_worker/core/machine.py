"""The whole engine except its model and its sockets, as a hypothesis state machine.

In any order of submits, cancels, next attempts, steps, failures, passing time and full lanes: the cache is consistent,
blocks have the content that the index says, routers know the findable blocks, replayed KV cache events give the same
blocks, and every sequence ends correctly.
"""

from random import Random

import structlog
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec.structs import replace

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.request import remaining
from sluice.ring.errors import FinishReason
from sluice.ring.hashing import short_hash
from sluice.ring.params import BeamSearchParams, RangeRetention, RetentionParams, Speculation
from sluice.ring.prompt_logprobs import Row
from sluice.ring.tables import NO_TABLES, PromptTables, Table, VirtualTokens
from sluice.ring.tensors import LOGITS_NAMES, NO_TENSORS, TensorParams, TensorRows
from sluice.ring.wire import Submit
from sluice.settings.engine import SchedulerNames
from tests.fakes.adapters import ScriptedAdapters, adapter, start_of
from tests.fakes.beams import search_alone
from tests.fakes.cache_follower import CacheFollower, contents
from tests.fakes.engine import EngineBench, spec_of
from tests.fakes.runner import (
    HIDDEN_SIZE,
    VOCAB,
    continuation,
    digest,
    draft_logits,
    prompt_row,
    shown_to_model,
    tensor_row,
)

COMPLETE = {FinishReason.EOS, FinishReason.STOP_TOKEN, FinishReason.LENGTH}
REFUSED = {"CONTEXT_OVERFLOW", "OVERLOADED", "INVALID_ARGUMENT"}
BASES = [[(7 * i + 31 * base) % 97 for i in range(40)] for base in range(5)]
"""Beginnings of prompts."""
LANES = ["mem://a", "mem://b"]
OWN, OTHER = "generation_logits", "hidden_states"
TENSORS = [
    TensorParams(output=(OWN,)),
    TensorParams(("context_logits",), (OWN, OTHER)),
    TensorParams((OTHER, "context_logits"), (OTHER,)),
    TensorParams(("context_logits",)),
]
ADAPTERS = [adapter(name) for name in "abc"]
SIZES = {ADAPTERS[0].version: 1, ADAPTERS[1].version: 2, ADAPTERS[2].version: 2}
"""Sizes of the adapters, in pages."""
TABLES = [
    PromptTables(tuple(Table.of(len(rows) // 4, HIDDEN_SIZE, "float16", rows) for rows in tables))
    for tables in ([b"same" * 5], [b"same" * 4 + b"last"], [b"same" * 2, b"same" * 3], [b"more" * 2, b"same" * 3])
]
QUIET = structlog.wrap_logger(None, wrapper_class=structlog.make_filtering_bound_logger(50))
EVENT_BUFFER = 1 << 16
"""More events than one rule causes."""
MOST_STEPS = 10_000
"""Limit on the steps until all requests have ended; a thousand is unusual."""
SECONDS = st.sampled_from([None, None, 0.02, 0.2, 2.0])


def version_of(spec: Submit) -> str | None:
    return None if spec.adapter is None else spec.adapter.version


def prompt_of(spec: Submit) -> list[int]:
    """The prompt as the model sees it."""
    return shown_to_model(spec.prompt, VirtualTokens.of(VOCAB, spec.tables))


class RouterView:
    """A router that reads the changes of the prefix cache from time to time."""

    def __init__(self) -> None:
        self.known = 0
        self.blocks: set[int] = set()

    def read_changes(self, bench: EngineBench) -> None:
        changes = bench.cache.tiers.journal.since(self.known)
        if changes is not None:
            assert changes.whole or changes.after == self.known
            self.blocks = set() if changes.whole else self.blocks
            self.blocks = self.blocks.difference(changes.removed).union(changes.stored)
            self.known = changes.last
        pools = (bench.cache.tiers.device, bench.cache.tiers.host)
        assert self.blocks == {short_hash(content.hash) for pool in pools for _, content in pool.contents()}


class Alarm:
    """The log of a scheduler that must not log warnings."""

    def error(self, event: str, **_) -> None:
        raise AssertionError(event)


def always_grows(cache: KvCacheManager) -> None:
    """Check that holders can always grow."""
    grow = cache._grow

    def must_grow(sequence) -> bool:
        assert grow(sequence), f"no blocks for {sequence}"
        return True

    cache._grow = must_grow


@st.composite
def retentions(draw) -> RetentionParams:
    edges = sorted(draw(st.lists(st.integers(0, 48), max_size=6, unique=True)))
    return RetentionParams(
        tuple(
            RangeRetention(start, end, draw(st.integers(0, 100)), draw(SECONDS))
            for start, end in zip(edges[::2], edges[1::2], strict=False)
        ),
        draw(st.sampled_from([35, 0, 50, 100])),
        draw(SECONDS),
    )


class EngineMachine(RuleBasedStateMachine):
    """Its rules are events; its invariants and the checks of the bench must hold after each of them."""

    def count(self, rules: int, engine_steps: int) -> None:
        """Called with the numbers of executed rules and engine steps; for subclasses."""

    @initialize(
        tokens=st.sampled_from([60, 48, 80, 36, 120]),
        tokens_per_block=st.sampled_from([1, 2, 3, 4, 5]),
        host=st.sampled_from([1, 0, 3, 0]),
        window=st.sampled_from([None, None, 2, 5, 9, 16, 30]),
        batch=st.sampled_from([6, 4, 3, 2, 1]),
        budget=st.sampled_from([6, 9, 16, 40]),
        chunked=st.sampled_from([True, True, False]),
        reuse=st.sampled_from([True, True, True, False]),
        policy=st.sampled_from(["max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"]),
        chunking=st.sampled_from(["first_come_first_served", "equal_progress"]),
        aging=st.sampled_from([0.0, 1.0]),
        overlap=st.booleans(),
        draft_batch=st.sampled_from([8, 2, 0]),
        pages=st.sampled_from([2, 3, 5, 2]),
        draft_context=st.sampled_from([None, 1000, 30]),
    )
    def start(
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
    ):
        num_blocks = tokens // tokens_per_block
        self._begin(
            EngineBench(
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
                adapters=ScriptedAdapters(pages, SIZES),
                draft_context=draft_context,
            ),
            policy,
        )

    def _begin(self, bench: EngineBench, policy: str) -> None:
        self.bench = bench
        self.scheduler = self.bench.engine._scheduler
        self.scheduler._warnings._log = Alarm()
        self.may_pause = policy == "max_utilization"
        if not self.may_pause:
            always_grows(self.bench.cache)
        self.failures = 0
        self.pauses = 0
        """Preemptions under a policy that never preempts: after failed steps only."""
        self.routers = [RouterView(), RouterView()]
        self.follower = CacheFollower()
        self.disturbed: set[int] = set()
        """Requests that need not end by themselves."""
        self.superseded: set[tuple[int, int]] = set()
        """Attempts that were followed by another one."""
        self.found: dict[tuple[int, int], list[list[int]]] = {}
        """Results of beam searches, by request and attempt."""
        self.checked: dict[tuple[int, int, int], int] = {}

    @rule(
        base=st.sampled_from(BASES),
        shared=st.sampled_from([12, 20, 8, 5, 40, 0]),
        own=st.lists(st.integers(0, 96), max_size=8),
        max_tokens=st.sampled_from([17, 30, 9, 3, 1]),
        n=st.sampled_from([1, 1, 1, 2, 3, 9]),
        priority=st.integers(1, 3),
        salt=st.sampled_from(["", "", "x"]),
        retention=st.one_of(st.just(RetentionParams()), retentions()),
        ends=st.one_of(st.just(()), st.lists(st.integers(0, 96), max_size=8).map(tuple)),
        min_tokens=st.integers(0, 4),
        time_limit=st.sampled_from([None, None, None, 0.0, 0.05, 0.3]),
        lane=st.sampled_from(LANES),
        times=st.sampled_from([2, 1, 3, 6]),
        left=st.one_of(st.none(), st.none(), st.randoms(use_true_random=False)),
        drafts=st.sampled_from([0, 4, 1, 9]),
        wrong=st.integers(0, 7),
        proposing=st.sampled_from([False, False, True]),
        threshold=st.sampled_from([None, 0.5, 1.0]),
        beams=st.sampled_from([None, None, BeamSearchParams(3), BeamSearchParams(6, 0.5, exhaustive=True)]),
        prompt_logprobs=st.sampled_from([None, None, 0, 2]),
        tensors=st.sampled_from([NO_TENSORS, NO_TENSORS, NO_TENSORS, *TENSORS]),
        adapter=st.sampled_from([None, None, *ADAPTERS]),
        tables=st.sampled_from([NO_TABLES, NO_TABLES, *TABLES]),
    )
    def submit(
        self,
        base,
        shared,
        own,
        ends,
        lane,
        times,
        left=None,
        drafts=0,
        wrong=0,
        proposing=False,
        threshold=None,
        beams=None,
        **fields,
    ):
        if self.bench.runner.adapters is None:
            fields.pop("adapter", None)
        prompt = base[:shared] + own
        if rows := fields.get("tables", NO_TABLES).num_rows:
            # Most prompts begin with some of them, and end with one.
            prompt = [*range(VOCAB, VOCAB + rows), *prompt[: shared % 7], VOCAB, *prompt[shared % 7 :], VOCAB + 1]
            fields.pop("prompt_logprobs", None)
        if beams is not None:
            fields["n"], drafts, proposing = min(fields["n"], beams.width), 0, False
            fields["tensors"] = NO_TENSORS
        if not self.bench.engine.intake._chunked and fields.get("tensors", NO_TENSORS).context:
            fields["tensors"] = NO_TENSORS
        if left is not None:
            fields.pop("prompt_logprobs", None)
        for _ in range(times):
            number = len(self.bench.specs) + 1
            spec = spec_of(
                prompt,
                request=number,
                seed=number,
                detokenizer=lane,
                eos_token_ids=ends[::2],
                stop_token_ids=ends[1::2],
                beams=beams,
                **fields,
            )
            if drafts or proposing:
                spec = replace(spec, speculation=self._speculation(spec, drafts, wrong))
            if proposing:
                logits = draft_logits(len(spec.speculation.draft_token_ids))
                spec = replace(
                    spec,
                    speculation=replace(spec.speculation, draft_logits=logits, acceptance_threshold=threshold),
                )
            self.bench.send(spec if left is None else self._resuming(spec, left))
            if fields["time_limit"] is not None:
                self.disturbed.add(number)

    @precondition(lambda self: self.bench.specs)
    @rule(pick=st.randoms(use_true_random=False), lane=st.sampled_from(LANES))
    def next_attempt(self, pick, lane):
        """The previous attempt may be live or not; the next one resumes from any part of its output."""
        number, _ = pick.choice(sorted(self.bench.specs)[-6:])
        former = max(spec.attempt for spec in self.bench.specs.values() if spec.request == number)
        spec = replace(self.bench.specs[number, former], attempt=former + 1, detokenizer=lane)
        again = spec.prompt_logprobs is not None and pick.random() < 0.5
        resuming = replace(spec, prompt_logprobs=None)
        self.bench.send(spec if again else self._resuming(resuming, pick))
        self.superseded.add((number, former))

    @precondition(lambda self: self.bench.specs)
    @rule(pick=st.randoms(use_true_random=False), one=st.booleans())
    def cancel(self, pick, one):
        number, attempt = pick.choice(sorted(self.bench.specs)[-6:])
        sequence = pick.randrange(self.bench.specs[number, attempt].n + 1) if one else None
        self.bench.cancel(number, sequence, attempt=attempt)
        self.disturbed.add(number)

    @precondition(lambda self: self.bench.specs)
    @rule(pick=st.randoms(use_true_random=False))
    def draw_fails(self, pick):
        number, _ = pick.choice(sorted(self.bench.specs)[-6:])
        self.bench.runner.faults.add((number, pick.randrange(self.bench.specs[number, 0].n)))
        self.disturbed.add(number)

    @precondition(lambda self: self.bench.specs)
    @rule(pick=st.randoms(use_true_random=False), steps=st.integers(1, 3))
    def draws_are_postponed(self, pick, steps):
        number, _ = pick.choice(sorted(self.bench.specs)[-6:])
        self.bench.runner.unready.add(number)
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
        self.bench.engine.cache.tiers.flush()

    @invariant()
    def outputs_are_right_so_far(self):
        self.count(1, 0)
        if not hasattr(self, "bench"):
            return
        for key, stream in self.bench.receiver.streams.items():
            if self.checked.get(key, -1) < len(stream.tokens):
                expected = self.continuation(self.bench.specs[key[:2]], key[2])
                assert stream.tokens == expected[: len(stream.tokens)]
                self.checked[key] = len(stream.tokens)

    @invariant()
    def events_say_what_is_in_the_cache(self):
        if hasattr(self, "bench"):
            self.follower.read(self.bench.cache.tiers.events)
            assert self.follower.blocks == contents(self.bench.cache.tiers)
            assert self.follower.dropped == 0

    def teardown(self):
        if not hasattr(self, "bench"):
            return
        for lane in self.bench.receiver.lanes.values():
            lane.full = False
        self.bench.runner.fail_moving = False
        for _ in range(MOST_STEPS):
            if not (self.bench.engine.live.requests or self.bench.inbox or self.bench.mailbox.waiting):
                break
            self._step()
            self.count(0, 1)
        self.bench.run()
        self.outputs_are_right_so_far()
        self.events_say_what_is_in_the_cache()
        for router in self.routers:
            router.read_changes(self.bench)
        assert self.bench.cache.pool.available == self.bench.cache.pool.num_blocks
        for (number, attempt), spec in self.bench.specs.items():
            for sequence in remaining(spec):
                self._ended_right(number, attempt, sequence)
        assert self.bench.mailbox._submits == {}
        if self.bench.runner.adapters is not None:
            assert not +self.bench.runner.adapters.users

    def continuation(self, spec: Submit, sequence: int) -> list[int]:
        """The output of an undisturbed sequence."""
        if spec.sampling.beam_search is not None:
            key = (spec.request, spec.attempt)
            if key not in self.found:
                self.found[key] = [tokens for tokens, _ in search_alone(spec)]
            return self.found[key][sequence]
        seed = spec.sampling.seed
        return continuation(prompt_of(spec), spec.stopping, seed, sequence, spec.speculation, version_of(spec))

    def check_prompt_logprobs(self, spec: Submit, rows: list[Row]) -> None:
        """Check that the received rows are those of an undisturbed request."""
        top = spec.prompt_logprobs or 0
        assert rows == [prompt_row(spec.prompt, i, top, version_of(spec)) for i in range(len(rows))]

    def _check_tensors(self, spec: Submit, sequence: int, *, complete: bool) -> None:
        """Check that the received rows are right, and that those of a complete sequence are complete. Those of the
        prompt are complete unless a sequence of the request was ended early: it may have been the one to compute
        them."""
        key, found = (spec.request, spec.attempt), self.bench.receiver.tensors
        output = self.bench.output(spec.request, sequence, spec.attempt)
        requested = [(0, name, True, spec.tensors.context_rows) for name in spec.tensors.context]
        num_sent = spec.tensors.output_rows.get(sequence, 0)
        requested += [(sequence, name, False, num_sent) for name in spec.tensors.output]
        for index, name, context, first in requested:
            parts = found.get((*key, index, name, context), [])
            count = len(spec.prompt) if context else len(output)
            if complete and (not context or self._all_complete(spec)):
                assert sum(part.rows for part in parts) == max(0, count - first)
            self.check_rows(spec, sequence, parts)

    def check_rows(self, spec: Submit, sequence: int, parts: list[TensorRows]) -> None:
        """Check that the rows of one tensor are those of an undisturbed request."""
        for part in parts:
            tokens = [*prompt_of(spec), *([] if part.context else self.continuation(spec, sequence))]
            before = 0 if part.context else len(spec.prompt) - 1
            source = "logits" if part.name in LOGITS_NAMES else part.name
            positions, start = range(before + part.start, before + part.end), start_of(version_of(spec))
            assert part.data == tensor_row(source, [digest(tokens[: position + 1], start) for position in positions])

    def _all_complete(self, spec: Submit) -> bool:
        ends = [self.bench.stream(spec.request, sequence, spec.attempt).end for sequence in remaining(spec)]
        return all(end is not None and end.reason in COMPLETE for end in ends)

    def _speculation(self, spec: Submit, drafts: int, wrong: int) -> Speculation:
        """Draft tokens: the output of the first sequence, with every `wrong`-th token changed unless `wrong` is 0."""
        expected = [*self.continuation(spec, 0)]
        if wrong:
            expected[wrong - 1 :: wrong] = [(token + 1) % VOCAB for token in expected[wrong - 1 :: wrong]]
        return Speculation(drafts, tuple(expected))

    def _resuming(self, spec: Submit, random: Random) -> Submit:
        """The request resumed with any part of the output of some sequences. Some have ended, at least one has not."""
        ended = random.sample(range(spec.n), random.choice([0, 0, random.randrange(spec.n)]))
        resume = {}
        for sequence in range(spec.n):
            if random.random() < 0.7:
                output = self.continuation(spec, sequence)
                resume[sequence] = output[: random.randrange(len(output) + 1)]
        tensors = spec.tensors
        if tensors.output:
            rows = {sequence: random.randrange(len(output) + 1) for sequence, output in resume.items()}
            tensors = replace(tensors, output_rows=rows)
        if tensors.context:
            tensors = replace(tensors, context_rows=random.randrange(len(spec.prompt) + 1))
        return replace(spec, resume=resume, ended=ended, tensors=tensors)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._step()
        self.count(0, count)

    def _step(self) -> None:
        ran, active = self.bench.step(), self.bench.engine.live.active
        assert ran or not active or any(sequence.gated for sequence in active), "no sequence runs"
        self._note_failures()
        assert self.may_pause or self.bench.cache.preemptions == self.pauses, "paused"

    def _note_failures(self) -> None:
        """A failing step may raise only later, when it is collected."""
        if self.bench.runner.failures > self.failures:
            self.failures = self.bench.runner.failures
            self.disturbed |= {number for number, _ in self.bench.specs}
            self.pauses = self.bench.cache.preemptions

    def _ended_right(self, number: int, attempt: int, sequence: int) -> None:
        end = self.bench.stream(number, sequence, attempt).end
        assert end is not None
        spec = self.bench.specs[number, attempt]
        rows = self.bench.receiver.prompt_logprobs.get((number, attempt), [])
        if spec.prompt_logprobs is None:
            assert not rows
        elif (number, attempt) in self.bench.receiver.opens:
            self.check_prompt_logprobs(spec, rows)
            assert len(rows) == len(spec.prompt) - 1 or not self.bench.output(number, sequence, attempt)
        self._check_tensors(spec, sequence, complete=end.reason in COMPLETE)
        if end.reason in COMPLETE:
            expected = self.continuation(self.bench.specs[number, attempt], sequence)
            assert self.bench.output(number, sequence, attempt) == expected
        elif (number, attempt) in self.superseded and end.reason is FinishReason.ABORTED:
            pass
        elif number not in self.disturbed:
            assert end.fault.code in REFUSED | ({"NOT_BUILT_YET"} if not self.may_pause else set())
