"""An engine with a scripted or given runner, lanes in memory, and a clock that advances only with steps and by hand."""

import time
from collections.abc import Callable
from dataclasses import asdict

import structlog

from engine_worker.core.engine import Engine
from engine_worker.core.refusals import EngineLimits, longest_sequence
from engine_worker.hooks import Hooks, Report
from engine_worker.kvcache.keepers import Keepers
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.protocol import Runner
from engine_worker.request import State
from engine_worker.ringside.mailbox import Mailbox
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.tensor_outbox import TensorOutbox
from sluice.settings.engine import Batching, SchedulerNames
from sluice.wire.adapters import Adapter
from sluice.wire.errors import FinishReason
from sluice.wire.params import BeamSearchParams, RetentionParams, SamplingParams, Speculation, StopParams, TextParams
from sluice.wire.requests import Cancel, Submit
from sluice.wire.tables import NO_TABLES, PromptTables
from sluice.wire.tensors import NO_TENSORS, TensorParams
from tests.fakes.adapters import ScriptedAdapters
from tests.fakes.clock import Clock
from tests.fakes.drafting import draft_from_the_first_step
from tests.fakes.lane import Receiver, Stream
from tests.fakes.memory import MemoryCheck
from tests.fakes.runner import ScriptedRunner
from tests.fakes.scripted_tokens import VOCAB, continuation
from tests.fakes.submits import extras_of, submit_of

EPOCH = 7
MAX_CONTEXT = 1 << 20
"""Context length of the scripted model, in tokens."""


def spec_of(
    prompt,
    max_tokens: int = 8,
    *,
    request: int = 1,
    attempt: int = 0,
    n: int = 1,
    seed: int = 0,
    priority: int = 2,
    salt: str = "",
    time_limit: float | None = None,
    detokenizer: str = "mem://a",
    epoch: int = EPOCH,
    logprobs: int | None = None,
    retention: RetentionParams = RetentionParams(),  # noqa: B008 - frozen
    resume: dict[int, list[int]] | None = None,
    ended: tuple[int, ...] = (),
    alone: bool = False,
    speculation: Speculation = Speculation(),  # noqa: B008 - frozen
    beams: BeamSearchParams | None = None,
    prompt_logprobs: int | None = None,
    tensors: TensorParams = NO_TENSORS,
    adapter: Adapter | None = None,
    tables: PromptTables = NO_TABLES,
    kv_keepers: tuple[str, ...] = (),
    **stopping,
) -> Submit:
    return submit_of(
        request=request,
        attempt=attempt,
        engine_epoch=epoch,
        name=f"request-{request}",
        prompt=list(prompt),
        n=n,
        sampling=SamplingParams(seed=seed, logprobs=logprobs, beam_search=beams),
        stopping=StopParams(max_tokens=max_tokens, **stopping),
        text=TextParams(),
        priority=priority,
        salt=salt,
        time_limit=time_limit,
        detokenizer=detokenizer,
        router="mem://router",
        retention=retention,
        resume=resume or {},
        ended=list(ended),
        alone=alone,
        speculation=speculation,
        prompt_logprobs=prompt_logprobs,
        tensors=tensors or None,
        adapter=adapter,
        tables=None if tables == NO_TABLES else tables,
        kv_keepers=list(kv_keepers),
    )


class EngineBench:
    """Submits requests, steps the engine, and checks the engine's and the runner's invariants after every step."""

    overlap = False
    """Default of the argument: whether a step is launched before the results of the previous step are collected."""

    def __init__(
        self,
        num_blocks: int = 64,
        tokens_per_block: int = 4,
        max_batch_size: int = 8,
        max_tokens_per_step: int = 32,
        chunked_context: bool = True,
        block_reuse: bool = True,
        max_requests: int = 64,
        max_sequence_tokens: int | None = None,
        num_host_blocks: int = 0,
        window: int | None = None,
        overlap: bool | None = None,
        log: structlog.stdlib.BoundLogger | None = None,
        schedulers: SchedulerNames | None = None,
        runner: Runner | None = None,
        tensor_buffer: int = 64,
        adapters: ScriptedAdapters | None = None,
        draft_context: int | None = None,
        exact: bool = False,
        separates: bool = False,
        folder: PoolFolder | None = None,
        vocab_size: int = VOCAB,
        fingerprint: str = "fingerprint",
        host_file: bool = False,
        keepers: Callable[[PoolFile], Keepers] | None = None,
        **batching,
    ) -> None:
        """`folder`: for the scripted runner's blocks, or with `host_file` for those on the host, as on a GPU.
        `keepers`: makes them for its file. `batching`: further fields of Batching. `num_blocks` etc. apply to the
        scripted runner, not a given one."""
        self.clock = Clock()
        self.receiver = Receiver()
        overlapping = self.overlap if overlap is None else overlap
        scripted = ScriptedRunner(
            num_blocks,
            tokens_per_block,
            num_host_blocks,
            window,
            overlapping,
            draft_context,
            exact=exact,
            separates=separates,
        )
        scripted.adapters = adapters
        if folder is not None:
            scripted.keep_blocks(folder, on_host=host_file)
        self.runner = runner or scripted
        self.inbox: list[Submit | Cancel] = []
        self.specs: dict[tuple[int, int], Submit] = {}
        log = log or structlog.get_logger()
        self.outbox = Outbox("engine", EPOCH, self.receiver.open_lane, self.clock, log)
        self.tensor_outbox = TensorOutbox("engine", EPOCH, self.receiver.open_lane, self.clock, log, tensor_buffer)
        self.mailbox = Mailbox(EPOCH, self._receive, self.outbox, self.tensor_outbox, log)
        self.reports: list[Report] = []
        batching = Batching(
            max_batch_size,
            max_tokens_per_step,
            chunked_context=chunked_context,
            block_reuse=block_reuse,
            **asdict(schedulers or SchedulerNames()),
            **batching,
        )
        longest = max_sequence_tokens or longest_sequence(self.runner, batching, MAX_CONTEXT)
        self.engine = Engine(
            self.runner,
            EngineLimits(
                fingerprint,
                vocab_size,
                longest,
                max_requests,
                tensors=frozenset(self.runner.tensors),
                has_adapters=self.runner.adapters is not None,
                hidden_size=self.runner.hidden_size,
                image_rows=self.runner.image_rows,
            ),
            batching,
            Hooks(
                self.mailbox.get_requests,
                self.mailbox.send_responses,
                self.mailbox.poll_stop_ids,
                self.reports.append,
                self.mailbox.tensor_room,
            ),
            self.clock,
            log,
            None if keepers is None or scripted.pool_file is None else keepers(scripted.pool_file),
        )
        draft_from_the_first_step(self.engine)
        self.cache = self.engine.cache
        self._memory = MemoryCheck(self.cache, scripted) if runner is None else None

    def submit(self, prompt, max_tokens: int = 8, *, request: int | None = None, **options) -> int:
        """Send a request built by `spec_of`. Returns its number; by default one more than those sent so far."""
        number = len(self.specs) + 1 if request is None else request
        self.send(spec_of(prompt, max_tokens, request=number, **options))
        return number

    def send(self, spec: Submit) -> None:
        self.inbox.append(spec)
        self.specs.setdefault((spec.request, spec.attempt), spec)
        first_rows, key = self.receiver.first_rows, (spec.request, spec.attempt)
        tensors = extras_of(spec).tensors or NO_TENSORS
        first_rows[*key, 0, True] = tensors.context_rows
        first_rows |= {(*key, index, False): rows for index, rows in tensors.output_rows.items()}

    def cancel(self, request: int, sequence: int | None = None, *, attempt: int = 0, epoch: int = EPOCH) -> None:
        self.inbox.append(Cancel(request, attempt, epoch, sequence))

    def step(self) -> bool:
        ran = self.engine.step()
        self.outbox.flush()
        self.tensor_outbox.flush()
        self.clock.now += 0.01
        self.check()
        self.receiver.read()
        return ran

    def run(self, limit: int = 10_000) -> int:
        """Step until no request is left. Returns the number of steps."""
        for steps in range(limit):
            if self.step():
                continue
            if not self.engine.live.requests and not self.mailbox.waiting:
                return steps
            if self.cache.fetches:
                # Like an engine that waits for messages: another thread is copying.
                time.sleep(0.001)
        raise AssertionError(f"still busy after {limit} steps")

    def stream(self, request: int, sequence: int = 0, attempt: int = 0) -> Stream:
        return self.receiver.streams[request, attempt, sequence]

    def output(self, request: int, sequence: int = 0, attempt: int = 0) -> list[int]:
        """All output token ids, including those that the attempt resumed from."""
        return self.stream(request, sequence, attempt).tokens

    def ended(self, request: int, sequence: int = 0, attempt: int = 0) -> FinishReason | None:
        """Finish reason of a sequence; None: it has not ended."""
        end = self.stream(request, sequence, attempt).end
        return None if end is None else end.reason

    def fault(self, request: int, sequence: int = 0, attempt: int = 0) -> str:
        return self.stream(request, sequence, attempt).end.fault.code

    @property
    def dropped(self) -> dict[str, int]:
        """Number of messages that the engine ignored, by reason."""
        unknown = self.engine.intake.unknown_stops
        return {**self.mailbox.dropped, **({"unknown_cancel": unknown} if unknown else {})}

    def expected(self, request: int, sequence: int = 0, attempt: int = 0) -> list[int]:
        """The output of the same sequence if nothing disturbs it."""
        spec = self.specs[request, attempt]
        version, seed = spec.adapter_version, spec.sampling.seed
        return continuation(spec.prompt, spec.stopping, seed, sequence, extras_of(spec).speculation, version)

    def check(self) -> None:
        self.cache.check()
        if self._memory is not None:
            self._memory.check()
            assert self.runner.violations == [], self.runner.violations[:2]
        live = self.engine.live
        assert [s.order for s in live.active] == sorted(s.order for s in live.active)
        assert set(self.cache.holders) == {s for s in live.active if s.state is State.RUNNING}
        for request in live.requests.values():
            assert request.num_live == sum(s.state is not State.ENDED for s in request.sequences) > 0
            for sequence in request.sequences:
                assert (sequence in live.active) == (sequence.state not in (State.AWAITING, State.ENDED))
        stats = self.engine.stats.latest
        assert stats.free_kv_blocks + stats.used_kv_blocks == stats.max_kv_blocks
        retired = self.cache.retired
        assert all(s.state is State.ENDED and s.num_inflight and s.blocks for s in retired)
        in_flight = bool(self.engine._in_flight)
        assert in_flight or not (retired or any(s.num_inflight or s.num_promised for s in live.active))
        if not live.requests:
            assert not live.active
        if not (live.requests or in_flight):
            fetches, tiers = self.cache.fetches, self.cache.tiers
            copying = 0 if fetches is None or tiers.shared is tiers.host else len(fetches.held)
            assert stats.used_kv_blocks == copying
            assert not self.cache.holders
            assert tiers.pending or not tiers._launched

    def _receive(self):
        messages, self.inbox = self.inbox, []
        return messages
