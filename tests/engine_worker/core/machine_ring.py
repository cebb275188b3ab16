"""Several engines that share a folder of pool files, as a hypothesis state machine.

All rules of `EngineMachine` act on one of the engines. Further ones kill an engine at any write, restart it, move
requests to another engine as a router does, copy blocks, let copies fail, and damage files. After each rule, everything
that another engine would accept from any file has the right content.

- `machine_seats`: the engines and the requests that lose theirs; `tests.fakes.pool_files`: files, copies and kills
"""

import tempfile
from functools import partial
from pathlib import Path

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from msgspec.structs import replace

from tests.engine_worker.core.machine import EngineMachine
from tests.engine_worker.core.machine_inputs import ENGINES, LANES, RANDOM_CHOICES, REQUESTS
from tests.engine_worker.core.machine_oracle import Oracle
from tests.engine_worker.core.machine_seats import Orphan, Seat, without_rows
from tests.fakes.engine import EngineBench
from tests.fakes.machine_keepers import Asking, MachineKeepers
from tests.fakes.pool_files import FileView, KilledError, KillSwitch, Reader, damage
from tests.fakes.scripted_cache import FileBlocks

MEMORY = Path("/dev/shm")
ENGINE_STATE = ("bench", "oracle", "checks", "routers", "follower", "failures", "allowed_preemptions")
"""Attributes of `EngineMachine` that belong to one engine."""
MAX_STEPS_TO_A_KILL = 12
LEAST_LOSS = 3
"""Cached blocks of an engine that may be killed."""


class RingMachine(EngineMachine):
    @initialize(seats=st.sampled_from([2, 3]), apart=st.booleans(), **{**ENGINES, "reuse": st.just(True)})
    def start(self, seats, apart, **options):
        self.options = options
        self.layout = FileBlocks.layout(options["tokens_per_block"])
        self.digests: dict[bytes, int] = {}
        """Digest of all tokens up to the end of a block, by block hash, for all engines."""
        self.temporary = tempfile.TemporaryDirectory(dir=MEMORY, prefix="sluice-machine-")
        self.folder = Path(self.temporary.name)
        self.seats = [Seat("abc"[number], apart=apart) for number in range(seats)]
        self.seat = self.seats[0]
        self.orphans: list[Orphan] = []
        for seat in self.seats:
            self._start_engine(seat)

    @rule(number=st.integers(0, 2))
    def switch(self, number):
        """Further rules act on another engine."""
        self._start_engine(self.seats[number % len(self.seats)])

    @rule(number=st.integers(0, 2), count=st.sampled_from([30, 12, 60]), **REQUESTS)
    def serve(self, number, count, **request):
        """Without this rule, few engines would live long enough to have blocks that others want."""
        self.switch(number)
        self.submit(**request)
        self._steps(count)

    @precondition(lambda self: len(self.bench.cache.pool.hashes()) >= LEAST_LOSS)
    @rule(torn=st.booleans())
    def kill(self, torn):
        """Between two steps, perhaps while a block is copied."""
        if torn and self.seat.reader.jobs:
            _, targets, copied, _ = self.seat.reader.jobs[0]
            block = self.bench.runner.pool_file.parts[0][targets[len(copied)].block]
            block[: len(block) // 2 + 1] = 0xAB
        self._die()

    @precondition(lambda self: len(self.bench.cache.pool.hashes()) >= LEAST_LOSS)
    @rule(writes=st.integers(1, 60))
    def kill_at_a_write(self, writes):
        KillSwitch(self.bench, writes)
        try:
            for _ in range(MAX_STEPS_TO_A_KILL):
                self._step()
        except KilledError:
            pass
        self._die()

    @precondition(lambda self: getattr(self, "orphans", None))
    @rule(choices=RANDOM_CHOICES, lane=st.sampled_from(LANES))
    def continue_orphans(self, choices, lane):
        for orphan in choices.sample(self.orphans, choices.randrange(len(self.orphans)) + 1):
            self.orphans.remove(orphan)
            self._continue(orphan, lane)

    @precondition(lambda self: self.bench.specs)
    @rule(choices=RANDOM_CHOICES, number=st.integers(0, 2))
    def move_request(self, choices, number):
        """To another engine, while this one still computes it: it drains, or seems to hang."""
        attempt = choices.choice(sorted(self.bench.specs)[-6:])
        orphan = self._orphan(self.bench, attempt)
        self.switch(number)
        if orphan is not None:
            self._continue(orphan, LANES[0])

    @rule(blocks=st.sampled_from([0, 1, 3, 100]))
    def copies_take_time(self, blocks):
        """Blocks that the engine copies in the time of a step."""
        self.seat.speed = blocks

    @rule(count=st.integers(1, 9))
    def blocks_are_copied(self, count):
        self.seat.reader.copy(count)

    @precondition(lambda self: getattr(self, "seat", None) and self.seat.asking)
    @rule(count=st.integers(1, 9), failing=st.integers(0, 4))
    def keepers_answer(self, count, failing):
        self.seat.asking.keepers.failing = failing
        self.seat.asking.ask(count)

    @rule(count=st.integers(1, 3))
    def copies_will_fail(self, count):
        self.seat.reader.failing = count

    @rule(choices=RANDOM_CHOICES)
    def file_is_damaged(self, choices):
        living = {seat.state["bench"].runner.pool_file.path for seat in self.seats if seat.state}
        paths = self._paths()
        if paths:
            path = choices.choice(paths)
            damage(path, self.layout, choices, alive=str(path) in living)

    @rule(count=st.sampled_from([1, 3, 8, 20]))
    def all_engines_step(self, count):
        current = self.seat
        for seat in self.seats:
            if seat.state:
                self._take(seat)
                self._steps(count)
                self.outputs_are_right_so_far()
                self.events_say_what_is_in_the_cache()
        self._take(current)

    @invariant()
    def files_contain_what_they_say(self):
        if not hasattr(self, "folder"):
            return
        for path in self._paths():
            FileView(path, self.layout).check(self.digests)
        for seat in self.seats:
            if seat.state:
                check_entries(seat.state["bench"])

    def teardown(self):
        """Let everything end, on the engines that live, then check that nothing is left."""
        if not hasattr(self, "folder"):
            return
        try:
            for orphan in self.orphans:
                self._continue(orphan, LANES[0])
            for seat in self.seats:
                if seat.state:
                    self._take(seat)
                    seat.reader.failing, seat.speed = 0, 100
                    if seat.asking:
                        seat.asking.keepers.failing = 0
                    super().teardown()
                    assert not self.bench.cache.copying
                    self.files_contain_what_they_say()
            for seat in self.seats[1:]:
                if seat.state:
                    self._take(seat)
                    self._die(restart=False)
            self._start_engine(self.seats[0])
            self.seats[0].state["bench"].cache.flush()
            # Other machines are out of reach.
            own = self.seats[0].place(self.folder)
            left = [str(path) for path in self._paths() if path.is_relative_to(own)]
            assert left == [self.bench.runner.pool_file.path]
        finally:
            for seat in self.seats:
                if seat.state:
                    seat.state["bench"].runner.pool_file.close()
            self.temporary.cleanup()

    def _step(self):
        self.seat.reader.copy(self.seat.speed)
        if self.seat.asking:
            self.seat.asking.ask(self.seat.speed)
        super()._step()
        check_entries(self.bench)

    def _start_engine(self, seat: Seat) -> None:
        """Let the rules act on this engine, which is started if it is dead."""
        if seat.state:
            self._take(seat)
        else:
            self._put_back()
            keepers = partial(MachineKeepers, self.folder) if seat.apart else None
            bench = self._new_bench(**self.options, folder=seat.folder(self.folder), keepers=keepers)
            bench._memory._digests = self.digests
            seat.reader, seat.speed = Reader(bench), 3
            seat.asking = Asking(bench) if seat.apart else None
            self._begin(bench, Oracle(), self.options["policy"])
            self.seat = seat
            seat.state = {name: getattr(self, name) for name in ENGINE_STATE}
            bench.check()
            for router in self.routers:
                router.read_changes(bench)

    def _take(self, seat: Seat) -> None:
        """Let the rules act on this engine, which lives."""
        self._put_back()
        self.seat = seat
        for name, value in seat.state.items():
            setattr(self, name, value)

    def _put_back(self) -> None:
        if self.seat.state:
            self.seat.state = {name: getattr(self, name) for name in ENGINE_STATE}

    def _paths(self) -> list[Path]:
        return sorted(self.folder.rglob("*.pool"))

    def _die(self, *, restart: bool = True) -> None:
        """The engine's requests lose it. Rules act on another engine, or on the next one in its place."""
        bench, seat = self.bench, self.seat
        bench.runner.pool_file.close()
        self.orphans += filter(None, (self._orphan(bench, attempt) for attempt in self._newest(bench)))
        seat.state = {}
        living = [other for other in self.seats if other.state]
        if living:
            self._take(living[0])
        elif restart:
            self._start_engine(seat)

    def _newest(self, bench: EngineBench) -> list[tuple[int, int]]:
        newest: dict[int, int] = {}
        for number, attempt in bench.specs:
            newest[number] = max(attempt, newest.get(number, 0))
        return list(newest.items())

    def _orphan(self, bench: EngineBench, attempt: tuple[int, int]) -> Orphan | None:
        # What the engine has sent, the detokenizers receive.
        bench.receiver.read()
        return Orphan.of(bench, bench.specs[attempt], disturbed=attempt[0] in self.checks.disturbed)

    def _continue(self, orphan: Orphan, lane: str) -> None:
        number = len(self.bench.specs) + 1
        spec = without_rows(replace(orphan.spec, detokenizer=lane, **orphan.next_attempt(number)))
        self.bench.send(spec)
        if orphan.disturbed or spec.time_limit is not None:
            self.checks.disturbed.add(number)


def check_entries(bench: EngineBench) -> None:
    """The entries of a living engine's file are those of its findable blocks, except of those that a step fills."""
    file, tiers = bench.runner.pool_file, bench.cache.tiers
    entries = {block: file._hash[block].tobytes() for block in np.flatnonzero(file._valid).tolist()}
    findable = {block: content.hash for block, content in tiers.device.contents()}
    assert entries.items() <= findable.items()
    assert {block for block in findable if block not in entries} <= tiers._targets(), "a block has no entry"
