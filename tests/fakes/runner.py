"""A runner without a model: the next token is a function of all tokens before it, read back from the cache blocks."""

from collections.abc import Iterable
from struct import pack
from typing import NoReturn

from msgspec.structs import replace

from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.protocol import Preparation
from engine_worker.step import DeviceLostError, Draw, Drawn, Kept, KeptRows, Move, Slice, Step
from sluice.wire.calls import MethodCall, RankAnswer, failed
from sluice.wire.errors import ErrorCode, Fault
from sluice.wire.params import derive_seed
from sluice.wire.requests import Submit
from sluice.wire.tables import VirtualTokens
from tests.fakes.adapters import ScriptedAdapters, initial_digest
from tests.fakes.scripted_cache import FileBlocks, ScriptedCache
from tests.fakes.scripted_launch import ScriptedLaunch, draws_of, with_own_tokens
from tests.fakes.scripted_tokens import (
    HIDDEN_SIZE,
    MASK,
    TENSORS,
    VOCAB,
    accepts,
    candidates,
    choose,
    digest,
    logprob_of,
    scored_row,
    shown_to_model,
    tensor_row,
)
from tests.fakes.submits import extras_of

INJECTED = "out of luck"
"""The message of every failure that a test asked for."""


class ScriptedRules(tuple):
    """A sequence's prompt, which lets the runner check the whole context of each draw."""

    version: str | None = None
    """Version of the request's LoRA adapter."""

    def fork(self) -> "ScriptedRules":
        return self


class ScriptedRunner:
    """Computes steps on a `ScriptedCache`.

    `violations` lists everything that a real runner would compute wrongly: bad slots, draws that do not match their
    context, writes to what a step in flight still reads. Tests inject failures through the attributes.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        num_host_blocks: int = 0,
        window: int | None = None,
        overlap: bool = False,
        draft_context: int | None = None,
        exact: bool = False,
        separates: bool = False,
    ) -> None:
        """`draft_context`, `exact`, `separates`: see `Runner`. A draft model is right about four times out of five."""
        self.violations: list[str] = []
        self.draft_context = draft_context
        self.drafter: ScriptedRunner | None = None
        if draft_context is not None:
            self.drafter = ScriptedRunner(num_blocks, tokens_per_block, num_host_blocks, window)
        self.kv_cache = ScriptedCache(num_blocks, tokens_per_block, num_host_blocks, window, self.violations)
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.window = window
        self.tokens_per_block = tokens_per_block
        self.tensors = TENSORS
        self.adapters: ScriptedAdapters | None = None
        self.pool_file: PoolFile | None = None
        self.pool_folder: PoolFolder | None = None
        self.hidden_size = HIDDEN_SIZE
        self.image_rows = 0
        self.image_usage = None
        self.dtype = "none"
        self.exact = exact
        self.separates = separates
        self.choices = {"device": "none"}
        self.overlap = overlap
        """Steps are computed when they are collected; without overlap, when they are launched."""
        self.weights = 0
        """Stands for the model's weights: another number samples other tokens."""
        self.steps: list[Step] = []
        """All steps that were computed, or that failed while they were."""
        self.computed = 0
        """Tokens computed by all steps."""
        self.preparations: dict[int, Preparation] = {}
        """What a request has to wait for, by request number."""
        self.scored: list[bytes] = []
        """Log-probabilities of prompt tokens from the latest step."""
        self.kept: list[list[KeptRows]] = []
        """Tensor rows from the latest step."""
        self.missing: dict[int, str] = {}
        """Adapters that the latest step needed and that were not on the device, with the reason."""
        self.fail: str | None = None
        """Makes the next step raise: at its "launch", or "before" or "after" it is computed. "load": the first of its
        adapter loads fails instead."""
        self.fail_moving = False
        """The next step with moves to the device raises after half of its moves."""
        self.fail_drafting = False
        """The next call of `draft` raises after half of its slices."""
        self.failures = 0
        """Number of steps that raised and of loads that failed."""
        self.lost = False
        """From the next failure on, the device counts as lost."""
        self.faults: set[tuple[int, int]] = set()
        """(seed, sequence) of draws that return a fault."""
        self.unready: set[int] = set()
        """Seeds of requests whose draws are postponed."""
        self._in_flight: list[ScriptedLaunch] = []
        self._refused: ScriptedLaunch | None = None
        """The latest launch, if it raised."""
        self._excused: set[int] = set()
        """Ids of slices whose context may be arbitrary, because a step before them failed."""

    def keep_blocks(self, folder: PoolFolder, *, on_host: bool = False) -> None:
        """Keep the device blocks, or as on a GPU the host blocks, in a file. Call before the first step."""
        layout, num_blocks = FileBlocks.layout(self.tokens_per_block, on_host=on_host), self.num_blocks
        file = folder.open(layout, "", lambda: self.num_host_blocks if on_host else num_blocks)
        self.pool_folder, self.pool_file = folder, file
        if file is None:
            return
        if on_host:
            self.num_host_blocks, self.kv_cache.host_blocks = file.num_blocks, FileBlocks(file)
        else:
            self.num_blocks, self.kv_cache.blocks = file.num_blocks, FileBlocks(file)

    def prepare(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        return self.preparations.get(spec.request)

    def logit_rules(self, spec: Submit) -> list[object]:
        rules = ScriptedRules(shown_to_model(spec.prompt, VirtualTokens.of(VOCAB, extras_of(spec).tables)))
        rules.version = spec.adapter_version
        return [rules] * spec.n

    def draft(self, slices: Iterable[Slice]) -> list[Drawn]:
        fail, self.fail_drafting = self.fail_drafting, False
        slices = list(slices)
        if self._in_flight:
            self.violations.append("the draft model computes while a step is in flight")
        for part in slices:
            if part.start + len(part.tokens) > self.draft_context:
                self.violations.append(f"the draft model cannot compute {part}")
        drawn = self.drafter.run(Step(tuple(slices[: len(slices) // 2] if fail else slices)))
        self.violations += self.drafter.violations
        if fail:
            self._raise_injected()
        return [replace(guess, token=guess.token if guess.token % 5 else 1) for guess in drawn]

    def call(self, call: MethodCall) -> "ScriptedCall":
        return ScriptedCall(call)

    def check(self) -> None:
        if self.lost:
            raise DeviceLostError("the device answers no more")

    def launch(self, step: Step) -> ScriptedLaunch:
        fail, self.fail = self.fail, None
        previous, self._refused = self._refused or (self._in_flight[-1] if self._in_flight else None), None
        launched = ScriptedLaunch(self, step, fail, previous)
        if fail == "launch":
            self._refused = launched
            launched.error = RuntimeError(INJECTED)
            self._raise_injected()
        used = set().union(*(earlier.slots for earlier in self._in_flight))
        if used & launched.written:
            self.violations.append(f"slots {used & launched.written} are written while a step in flight uses them")
        if any(launched.overwrites_pages_of(earlier) for earlier in self._in_flight):
            self.violations.append("adapter pages are written while a step in flight reads them")
        self._in_flight.append(launched)
        if not self.overlap:
            launched.compute()
        return launched

    def landed(self, launched: ScriptedLaunch) -> None:
        """Called by a launch that was collected."""
        self._in_flight.remove(launched)

    def moves_in_flight(self) -> list[Move]:
        return [move for launched in self._in_flight for move in launched.moves]

    def compute(self, step: Step, fail: str | None, excused: set[int]) -> list[Drawn]:
        """`run` for a launched step, with the failure that was requested when the step was launched."""
        saved, self.fail, self._excused = self.fail, fail, excused
        try:
            return self.run(step)
        finally:
            self.fail, self._excused = saved, set()

    def run(self, step: Step) -> list[Drawn]:
        fail, self.fail = self.fail, None
        self.steps.append(Step(tuple(with_own_tokens(part) for part in step.slices), step.moves, step.loads))
        if fail == "before":
            self._raise_injected()
        if self.fail_moving and any(not move.kind.to_host for move in step.moves):
            self.fail_moving = False
            self._move(step.moves[: len(step.moves) // 2])
            self._raise_injected()
        self._move(step.moves)
        self._load(step, fail=fail == "load")
        self._excused |= {id(part) for part in step.slices if part.adapter_slot in self.missing}
        for part in step.slices:
            self.kv_cache.write(part, self._initial(part))
            self.computed += len(part.tokens)
        drawn = [self._draw(*self._read(part, later), draw) for part in step.slices for later, draw in draws_of(part)]
        self.scored = [self._score(part) for part in step.slices if part.scored is not None]
        self.kept = [self._keep(part, kept) for part in step.slices for kept in part.kept]
        if fail == "after":
            self._raise_injected()
        return drawn

    def _raise_injected(self) -> NoReturn:
        self.failures += 1
        raise RuntimeError(INJECTED)

    def _move(self, moves: Iterable[Move]) -> None:
        if self.drafter is not None:
            self.drafter._move(moves)
        self.kv_cache.move(moves)

    def _load(self, step: Step, *, fail: bool) -> None:
        self.missing = {}
        if self.adapters is None:
            return
        self.failures += fail and bool(step.loads)
        self.adapters.load(step.loads, fail=fail)
        used = {part.adapter_slot for part in step.slices if part.adapter_slot}
        self.missing = {number: INJECTED for number in used if self.adapters.version(number) is None}
        self.violations += self.adapters.violations

    def _initial(self, part: Slice) -> int:
        return initial_digest(self.adapters.version(part.adapter_slot) if part.adapter_slot else None)

    def _read(self, part: Slice, omitted: int) -> tuple[list[int], int]:
        """See `ScriptedCache.read`. No tokens: the slice is excused."""
        return ([], 0) if id(part) in self._excused else self.kv_cache.read(part, omitted, self._initial(part))

    def _score(self, part: Slice) -> bytes:
        scored, rows = part.scored, b""
        end = part.start + len(part.tokens)
        if not (scored.tokens and part.start <= scored.start and scored.start + len(scored.tokens) <= end):
            self.violations.append(f"{scored} is not within positions {part.start} to {end}")
        for row, token in enumerate(scored.tokens, scored.start):
            _, state = self._read(part, end - row - 1)
            if part.start + len(part.tokens) > row + 1 and part.tokens[row + 1 - part.start] != token:
                self.violations.append(f"{token} is not what follows position {row} of {part}")
            logprob, rank, alternatives = scored_row(state, token, scored.top)
            tokens, logprobs = [token for token, _ in alternatives], [logprob for _, logprob in alternatives]
            rows += pack(f"<fI{scored.top}I{scored.top}f", logprob, rank, *tokens, *logprobs)
        return rows

    def _keep(self, part: Slice, kept: Kept) -> list[KeptRows]:
        end = part.start + len(part.tokens)
        if not (kept.count and part.start <= kept.start and kept.start + kept.count <= end):
            self.violations.append(f"{kept} is not within positions {part.start} to {end}")
        states = [self._read(part, end - position - 1)[1] for position in range(kept.start, kept.start + kept.count)]
        rows = [tensor_row(name, states, self.weights) for name in kept.names]
        return [
            KeptRows(name, kept.start, (kept.count, 1), "int64", memoryview(data))
            for name, data in zip(kept.names, rows, strict=True)
        ]

    def _draw(self, tokens: list[int], state: int, draw: Draw) -> Drawn:
        if not tokens:
            return Drawn(0)
        self._check_context(tokens, state, draw)
        if draw.sampling.seed in self.unready:
            return Drawn(0, postponed=True)
        if (draw.sampling.seed, 0 if draw.candidates else draw.sequence) in self.faults:
            return Drawn(0, fault=Fault(ErrorCode.NOTHING_TO_SAMPLE.name, "everything is masked"))
        if draw.candidates:
            best = candidates(state, draw.banned)[: draw.candidates]
            return Drawn(best[0][0], best=best)
        seed = derive_seed(draw.sampling.seed, draw.sequence)
        token = choose(state + self.weights & MASK, seed, draw.position, draw.banned)
        if (proposal := draw.proposal) is not None:
            (row,) = set(proposal.logits.tolist())
            if accepts(state, seed, proposal.token, int(row), proposal.threshold, draw.banned):
                token = proposal.token
        return Drawn(token, logprob_of(token, draw.sampling))

    def _check_context(self, tokens: list[int], state: int, draw: Draw) -> None:
        """The context read from the cache must be the prompt and the output that the draw states."""
        output = [*draw.output, *draw.drafted]
        expected = [*draw.rules, *output]
        # The draft model has no adapters.
        version = None if self.adapters is None else draw.rules.version
        matches = tokens == expected[len(expected) - len(tokens) :]
        if not matches or state != digest(expected, initial_digest(version)) or len(output) != draw.position:
            self.violations.append(f"{draw} from {tokens}")
        if self.window is None and len(tokens) != len(expected):
            self.violations.append(f"{draw} after {len(tokens)} tokens")


class ScriptedCall:
    """A method call on one rank, answered at the second poll. The only method, "echo", returns its arguments."""

    def __init__(self, call: MethodCall) -> None:
        exists = call.method == "echo"
        self._answer = RankAnswer(0, call.args) if exists else failed(0, f"LookupError: no method {call.method!r}")
        self._polls = 0

    def poll(self) -> list[RankAnswer] | None:
        self._polls += 1
        return None if self._polls == 1 else [self._answer]
