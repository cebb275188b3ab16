"""A runner without a model: its next token is a function of all tokens before, read back from the cache blocks."""

from collections.abc import Iterable, Iterator
from struct import pack

from msgspec.structs import replace

from engine_worker.protocol import Preparation
from engine_worker.step import LOGITS, DeviceLostError, Draw, Drawn, Kept, KeptRows, Move, MoveKind, Slice, Step
from sluice.ring.calls import MethodCall, RankAnswer, failed
from sluice.ring.errors import ErrorCode, Fault
from sluice.ring.params import DraftLogits, SamplingParams, Speculation, derive_seed
from sluice.ring.rows import TokenLogprob
from sluice.ring.tables import VirtualTokens
from sluice.ring.wire import Submit
from tests.fakes.adapters import ScriptedAdapters, start_of

MASK = (1 << 64) - 1
VOCAB = 97
HIDDEN_SIZE = 2

Slot = tuple[int, int] | None
"""A token, and the digest of all up to it."""


def mix(state: int, value: int) -> int:
    state = ((state ^ value) * 6364136223846793005 + 1442695040888963407) & MASK
    return state ^ (state >> 29)


def digest(tokens, state: int = 0) -> int:
    for token in tokens:
        state = mix(state, token)
    return state


def choose(state: int, seed: int, position: int, banned=()) -> int:
    """The next token after tokens with this digest."""
    noise = mix(mix(state, seed), position)
    while noise % VOCAB in banned:
        noise = mix(noise, 1)
    return noise % VOCAB


def draft_logits(count: int) -> DraftLogits:
    """Row i is full of i, so that rows can be told apart."""
    return DraftLogits("float32", b"".join(pack("<f", row) * VOCAB for row in range(count)))


def accepts(state: int, seed: int, token: int, row: int, threshold: float | None, banned=()) -> bool:
    """Whether a token is accepted that was proposed after tokens with this digest."""
    noise = mix(mix(mix(state, seed), token), row)
    return token not in banned and noise % 8 < (4 if threshold is None else 8 - 6 * threshold)


def continuation(
    prompt,
    stopping,
    seed: int = 0,
    sequence: int = 0,
    speculation=Speculation(),  # noqa: B008
    version: str | None = None,
) -> list[int]:
    """What an undisturbed sequence gets; `version`: of its adapter."""
    state, output, seed = digest(prompt, start_of(version)), [], derive_seed(seed, sequence)
    ends = stopping.eos_token_ids + stopping.stop_token_ids
    drafts = speculation.draft_token_ids if speculation.draft_logits is not None else ()
    while len(output) < stopping.max_tokens:
        banned, at = ends if len(output) < stopping.min_tokens else (), len(output)
        follows = at < len(drafts) and drafts[:at] == tuple(output)
        if follows and accepts(state, seed, drafts[at], at, speculation.acceptance_threshold, banned):
            output.append(drafts[at])
        else:
            output.append(choose(state, seed, at, banned))
        state = mix(state, output[-1])
        if output[-1] in ends and len(output) > stopping.min_tokens:
            break
    return output


def shown_to_model(tokens, virtual: VirtualTokens | None) -> list[int]:
    """With the rows that virtual tokens stand for, as numbers behind the vocabulary."""
    if virtual is None:
        return list(tokens)
    size = 2 * HIDDEN_SIZE
    rows = [
        VOCAB + int.from_bytes(table.data[row * size : (row + 1) * size], "little")
        for table, _ in virtual.placed
        for row in range(table.rows)
    ]
    return [token if token < VOCAB else rows[token - VOCAB] for token in tokens]


class ScriptedProgram(tuple):
    """A prompt."""

    version: str | None = None
    """Of its adapter."""

    def fork(self) -> "ScriptedProgram":
        return self


def prompt_row(prompt, row: int, top: int, version: str | None = None) -> tuple[float, int, list[tuple[int, float]]]:
    """The log-probability of a prompt's token row + 1: a function of all tokens before it."""
    noise = mix(digest(prompt[: row + 1], start_of(version)), prompt[row + 1])
    return -float(noise % 64), 1 + noise % VOCAB, [((noise + i) % VOCAB, -float(i)) for i in range(top)]


TENSORS = {LOGITS: 8, "hidden_states": 8}


def tensor_row(name: str, states: Iterable[int], weights: int = 0) -> bytes:
    """Rows of positions, by the digests of the tokens up to them."""
    return b"".join(pack("<q", mix(state + weights & MASK, len(name)) >> 1) for state in states)


class ScriptedRunner:
    """Keeps (token, digest up to it) in every slot and reads whole contexts back through the block tables.

    With a window it reads only the last tokens. `violations` lists what no attention would survive: unwritten slots,
    tokens of others, draws that do not match.
    """

    def __init__(
        self,
        num_blocks: int,
        tokens_per_block: int,
        num_host_blocks: int = 0,
        window: int | None = None,
        overlap: bool = False,
        draft_context: int | None = None,
    ) -> None:
        """`draft_context`: see `Runner`; the draft model then guesses right but now and then."""
        self.draft_context = draft_context
        self.drafter: ScriptedRunner | None = None
        if draft_context is not None:
            self.drafter = ScriptedRunner(num_blocks, tokens_per_block, num_host_blocks, window)
        self.fail_drafting = False
        """The draft model raises in the midst of its next slices."""
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.window = window
        self.tokens_per_block = tokens_per_block
        self.tensors = TENSORS
        self.adapters: ScriptedAdapters | None = None
        self.hidden_size = HIDDEN_SIZE
        self.image_rows = 0
        self.image_usage = None
        self.dtype = "none"
        self.choices = {"device": "none"}
        self.overlap = overlap
        """Steps are computed when they are collected; without it when they are launched."""
        self.weights = 0
        """Other ones draw other tokens."""
        self.steps: list[Step] = []
        self.preparations: dict[int, Preparation] = {}
        """What requests wait for, by number."""
        self.computed = 0
        self.scored: list[bytes] = []
        """Of the latest step."""
        self.kept: list[list[KeptRows]] = []
        """The same."""
        self.violations: list[str] = []
        self.fail: str | None = None
        """At "launch", "before", "after" computing: the next step raises; "load": the first of its loads fails."""
        self.fail_moving = False
        """The next step that brings blocks to the device raises in the midst of that."""
        self.missing: dict[int, str] = {}
        """Of the latest step: adapters that it lacks."""
        self.failures = 0
        """Steps that raised, and loads that failed."""
        self.lost = False
        """Whether what fails next takes the device with it."""
        self.faults: set[tuple[int, int]] = set()
        """(seed, sequence) whose next draw fails."""
        self.unready: set[int] = set()
        """Seeds of requests whose draws are postponed."""
        self.blocks: list[list[Slot]] = [[None] * tokens_per_block for _ in range(num_blocks)]
        self.host_blocks: list[list[Slot]] = [[None] * tokens_per_block for _ in range(num_host_blocks)]
        self._in_flight: list[ScriptedLaunch] = []
        self._refused: ScriptedLaunch | None = None
        self._forgiven: set[int] = set()
        """Ids of slices that go on where a failed step left nothing."""

    def prepare(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        return self.preparations.get(spec.request)

    def programs(self, spec: Submit) -> list[object]:
        """The prompt, so that draws can be checked."""
        program = ScriptedProgram(shown_to_model(spec.prompt, VirtualTokens.of(VOCAB, spec.tables)))
        program.version = None if spec.adapter is None else spec.adapter.version
        return [program] * spec.n

    def draft(self, slices: Iterable[Slice]) -> list[Drawn]:
        fail, self.fail_drafting = self.fail_drafting, False
        slices = list(slices)
        if self._in_flight:
            self.violations.append("the draft model computes beside a step")
        for part in slices:
            if part.start + len(part.tokens) > self.draft_context:
                self.violations.append(f"the draft model cannot compute {part}")
        drawn = self.drafter.run(Step(tuple(slices[: len(slices) // 2] if fail else slices)))
        self.violations += self.drafter.violations
        if fail:
            self._raise()
        return [replace(each, token=each.token if each.token % 5 else 1) for each in drawn]

    def call(self, call: MethodCall) -> "ScriptedCall":
        return ScriptedCall(call)

    def launch(self, step: Step) -> "ScriptedLaunch":
        fail, self.fail = self.fail, None
        before, self._refused = self._refused or (self._in_flight[-1] if self._in_flight else None), None
        launched = ScriptedLaunch(self, step, fail, before)
        if fail == "launch":
            self._refused = launched
            launched.error = RuntimeError("out of luck")
            self._raise()
        used = set().union(*(earlier.slots for earlier in self._in_flight))
        if used & launched.written:
            self.violations.append(f"slots {used & launched.written} are written while a step in flight uses them")
        if any(launched.takes_pages_of(earlier) for earlier in self._in_flight):
            self.violations.append("adapter pages are written while a step in flight reads them")
        self._in_flight.append(launched)
        if not self.overlap:
            launched.compute()
        return launched

    def compute(self, step: Step, fail: str | None, forgiven: set[int]) -> list[Drawn]:
        """`run`, with what was asked for when the step was launched."""
        saved, self.fail, self._forgiven = self.fail, fail, forgiven
        try:
            return self.run(step)
        finally:
            self.fail, self._forgiven = saved, set()

    def check(self) -> None:
        if self.lost:
            raise DeviceLostError("the device answers no more")

    def landed(self, launched: "ScriptedLaunch") -> None:
        self._in_flight.remove(launched)

    def moves_in_flight(self) -> list[Move]:
        return [move for launched in self._in_flight for move in launched.moves]

    def slots_of(self, part: Slice, start: int, end: int) -> set[tuple[int, int]]:
        """(block, offset) of positions of a slice's sequence."""
        size = self.tokens_per_block
        return {(part.block_table[position // size], position % size) for position in range(max(0, start), end)}

    def slots_seen(self, part: Slice, end: int) -> set[tuple[int, int]]:
        """The same, from the first position that the slice's tokens see."""
        return self.slots_of(part, 0 if self.window is None else part.start - self.window + 1, end)

    def run(self, step: Step) -> list[Drawn]:
        fail, self.fail = self.fail, None
        self.steps.append(Step(tuple(freeze(part) for part in step.slices), step.moves, step.loads))
        if fail == "before":
            self._raise()
        if self.fail_moving and any(move.kind is not MoveKind.OFFLOAD for move in step.moves):
            self.fail_moving = False
            self._move(step.moves[: len(step.moves) // 2])
            self._raise()
        self._move(step.moves)
        self._load(step, fail=fail == "load")
        self._forgiven |= {id(part) for part in step.slices if part.adapter in self.missing}
        for part in step.slices:
            self._write(part)
        drawn = [self._draw(*self._read(part, behind), draw) for part in step.slices for behind, draw in drawing(part)]
        self.scored = [self._score(part) for part in step.slices if part.scored is not None]
        self.kept = [self._keep(part, kept) for part in step.slices for kept in part.kept]
        if fail == "after":
            self._raise()
        return drawn

    def _raise(self) -> None:
        self.failures += 1
        raise RuntimeError("out of luck")

    def _load(self, step: Step, *, fail: bool) -> None:
        self.missing = {}
        if self.adapters is None:
            return
        self.failures += fail and bool(step.loads)
        self.adapters.load(step.loads, fail=fail)
        gone = {part.adapter for part in step.slices if part.adapter and self.adapters.version(part.adapter) is None}
        self.missing = dict.fromkeys(gone, "out of luck")
        self.violations += self.adapters.violations

    def _start(self, part: Slice) -> int:
        return start_of(self.adapters.version(part.adapter) if part.adapter else None)

    def _move(self, moves: Iterable[Move]) -> None:
        if self.drafter is not None:
            self.drafter._move(moves)
        for kind, source, target in moves:
            read = self.host_blocks if kind is MoveKind.ONLOAD else self.blocks
            written = self.host_blocks if kind is MoveKind.OFFLOAD else self.blocks
            written[target] = read[source].copy()

    def _slots(self, part: Slice, position: int) -> tuple[list[Slot], int]:
        index, offset = divmod(position, self.tokens_per_block)
        return self.blocks[part.block_table[index]], offset

    def _write(self, part: Slice) -> None:
        if not part.tokens:
            self.violations.append("a slice without tokens")
        state = self._start(part)
        if part.start:
            slots, offset = self._slots(part, part.start - 1)
            before = slots[offset]
            state = before[1] if before else -1
        if part.virtual is None and max(part.tokens, default=0) >= VOCAB:
            self.violations.append(f"{part} does not say what its virtual tokens stand for")
        for position, token in enumerate(shown_to_model(part.tokens, part.virtual), part.start):
            state = mix(state, token)
            slots, offset = self._slots(part, position)
            slots[offset] = (token, state)
            self.computed += 1

    def _read(self, part: Slice, behind: int) -> tuple[list[int], int]:
        """The tokens that the slice's context holds without its last `behind`, as far as its first token sees, and the
        digest of all."""
        first = 0 if self.window is None else max(0, part.start - self.window + 1)
        state, tokens = self._start(part), []
        for position in range(first, part.start + len(part.tokens) - behind):
            slots, offset = self._slots(part, position)
            found = slots[offset]
            if id(part) in self._forgiven:
                return [], 0
            if found is not None:
                state = found[1] if position == first > 0 else mix(state, found[0])
            if found is None or found[1] != state:
                self.violations.append(f"position {position} of {part} holds {found}")
                break
            tokens.append(found[0])
        return tokens, state

    def _score(self, part: Slice) -> bytes:
        scored, found = part.scored, b""
        end = part.start + len(part.tokens)
        if not (scored.tokens and part.start <= scored.start and scored.start + len(scored.tokens) <= end):
            self.violations.append(f"{scored} in {part.start} to {end}")
        for row, token in enumerate(scored.tokens, scored.start):
            tokens, state = self._read(part, end - row - 1)
            if part.start + len(part.tokens) > row + 1 and part.tokens[row + 1 - part.start] != token:
                self.violations.append(f"{token} is not what follows position {row} of {part}")
            noise = mix(state, token) if tokens else 0
            best = [(noise + i) % VOCAB for i in range(scored.top)], [-float(i) for i in range(scored.top)]
            layout = f"<fI{scored.top}I{scored.top}f"
            found += pack(layout, -float(noise % 64), 1 + noise % VOCAB, *best[0], *best[1])
        return found

    def _keep(self, part: Slice, kept: Kept) -> list[KeptRows]:
        end = part.start + len(part.tokens)
        if not (kept.count and part.start <= kept.start and kept.start + kept.count <= end):
            self.violations.append(f"{kept} in {part.start} to {end}")
        states = [self._read(part, end - position - 1)[1] for position in range(kept.start, kept.start + kept.count)]
        rows = [tensor_row(name, states, self.weights) for name in kept.names]
        return [
            KeptRows(name, kept.start, (kept.count, 1), "int64", memoryview(data))
            for name, data in zip(kept.names, rows, strict=True)
        ]

    def _draw(self, tokens: list[int], state: int, draw: Draw) -> Drawn:
        if not tokens:
            return Drawn(0)
        output = [*draw.output, *draw.drafted]
        expected = [*draw.program, *output]
        seen = expected[len(expected) - len(tokens) :]
        # The draft model has no adapters.
        version = None if self.adapters is None else draw.program.version
        if tokens != seen or state != digest(expected, start_of(version)) or len(output) != draw.position:
            self.violations.append(f"{draw} from {tokens}")
        if self.window is None and len(tokens) != len(expected):
            self.violations.append(f"{draw} after {len(tokens)} tokens")
        if draw.sampling.seed in self.unready:
            return Drawn(0, postponed=True)
        if draw.candidates:
            return self._beam(state, draw)
        if (draw.sampling.seed, draw.sequence) in self.faults:
            return Drawn(0, fault=Fault(ErrorCode.NOTHING_TO_SAMPLE.name, "everything is masked"))
        seed = derive_seed(draw.sampling.seed, draw.sequence)
        token = choose(state + self.weights & MASK, seed, draw.position, draw.banned)
        if (its := draw.proposal) is not None:
            (row,) = set(its.logits.tolist())
            token = its.token if accepts(state, seed, its.token, int(row), its.threshold, draw.banned) else token
        return Drawn(token, logprob_of(token, draw.sampling))

    def _beam(self, state: int, draw: Draw) -> Drawn:
        if (draw.sampling.seed, 0) in self.faults:
            return Drawn(0, fault=Fault(ErrorCode.NOTHING_TO_SAMPLE.name, "everything is masked"))
        best = candidates(state, draw.banned)[: draw.candidates]
        return Drawn(best[0][0], best=best)


def candidates(state: int, banned=()) -> list[tuple[int, float]]:
    """The possible tokens after tokens with this digest and their log-probabilities, the best first."""
    scores = {token: -(mix(state, token) % 100_003) / 10_000 for token in range(VOCAB) if token not in banned}
    return sorted(scores.items(), key=lambda entry: (-entry[1], entry[0]))


class ScriptedCall:
    """Of one rank, which has one method: "echo" answers the arguments, at the second poll."""

    def __init__(self, call: MethodCall) -> None:
        known = call.method == "echo"
        self._answer = RankAnswer(0, call.args) if known else failed(0, f"LookupError: no method {call.method!r}")
        self._polls = 0

    def poll(self) -> list[RankAnswer] | None:
        self._polls += 1
        return None if self._polls == 1 else [self._answer]


class ScriptedLaunch:
    """A step on its way. It is computed from what was known when it was launched and from what the one before drew."""

    def __init__(self, runner: ScriptedRunner, step: Step, fail: str | None, before: "ScriptedLaunch | None") -> None:
        self._runner = runner
        self._fail = fail
        self._before = before
        self._step = Step(tuple(map(frozen, step.slices)), step.moves, step.loads)
        self.moves = step.moves
        adapters = runner.adapters
        self._loaded = {} if adapters is None else adapters.launched(step.loads)
        self._used_pages = self._loaded.copy()
        if adapters is not None:
            for part in step.slices:
                self._used_pages |= adapters.pages(part.adapter)
        self._drawn: list[Drawn] = []
        self._scored: list[bytes] = []
        self._missing: dict[int, str] = {}
        self._kept: list[list[KeptRows]] = []
        self.error: Exception | None = None
        size = runner.tokens_per_block
        targets = [move.target for move in step.moves if move.kind is not MoveKind.OFFLOAD]
        self.written = {(block, offset) for block in targets for offset in range(size)}
        """On the device."""
        self.slots: set[tuple[int, int]] = set()
        """What its slices read and write."""
        for part in self._step.slices:
            end = part.start + len(part.tokens)
            self.written |= runner.slots_of(part, part.start, end)
            self.slots |= runner.slots_seen(part, end)

    def takes_pages_of(self, earlier: "ScriptedLaunch") -> bool:
        """An adapter that is loaded again, after a failed step, is the same as before."""
        return any(earlier._used_pages.get(page, number) != number for page, number in self._loaded.items())

    def compute(self) -> None:
        runner, before, self._before = self._runner, self._before, None
        step = Step(tuple(self._filled(part, before) for part in self._step.slices), self._step.moves, self._step.loads)
        forgiven = set()
        if before is not None and before.error is not None:
            lost = self._lost_with(before)
            forgiven = {id(part) for part in step.slices if runner.slots_seen(part, part.start) & lost}
        try:
            self._drawn = runner.compute(step, self._fail, forgiven)
            self._scored, self._kept, self._missing = runner.scored, runner.kept, runner.missing
        except Exception as error:  # noqa: BLE001 - the step fails with it
            self.error = error

    def _lost_with(self, before: "ScriptedLaunch") -> set[tuple[int, int]]:
        """Slots that hold anything once this step's moves are made, for one before it failed."""
        size = self._runner.tokens_per_block
        lost = before.written.copy()
        on_host = {(move.target, i) for move in before.moves if move.kind is MoveKind.OFFLOAD for i in range(size)}
        for kind, source, target in self.moves:
            read = on_host if kind is MoveKind.ONLOAD else lost
            written = on_host if kind is MoveKind.OFFLOAD else lost
            for i in range(size):
                (written.add if (source, i) in read else written.discard)((target, i))
        return lost

    def collect(self) -> list[Drawn]:
        if self._runner.overlap:
            self.compute()
        self._runner.landed(self)
        if self.error is not None:
            raise self.error
        return self._drawn

    def missing_adapters(self) -> dict[int, str]:
        return self._missing

    def prompt_logprobs(self) -> list[bytes]:
        return self._scored

    def kept_rows(self) -> list[list[KeptRows]]:
        return self._kept

    def _filled(self, part: Slice, before: "ScriptedLaunch | None") -> Slice:
        if part.follows is None:
            return part
        if before is None:
            self._runner.violations.append(f"{part} follows no step")
        token = 0 if before is None or before.error is not None else before._drawn[part.follows].token
        draws = tuple(replace(draw, output=(*draw.output, token)) for draw in part.draws)
        return replace(part, tokens=(*part.tokens[:-1], token), draws=draws, follows=None)


def drawing(part: Slice) -> Iterator[tuple[int, Draw]]:
    """The slice's draws, each with how many of its tokens come after it."""
    if part.drafts and len(part.draws) != part.drafts + 1:
        raise AssertionError(f"{len(part.draws)} draws for {part.drafts} drafts")
    for i, draw in enumerate(part.draws):
        yield (part.drafts - i if part.drafts else 0), draw


def logprob_of(token: int, sampling: SamplingParams) -> TokenLogprob | None:
    return None if sampling.logprobs is None else TokenLogprob(-token / VOCAB, 1, [])


def freeze(part: Slice) -> Slice:
    return replace(part, tokens=tuple(part.tokens), block_table=tuple(part.block_table))


def frozen(part: Slice) -> Slice:
    """With all that the engine may change."""
    return replace(freeze(part), draws=tuple(replace(draw, output=tuple(draw.output)) for draw in part.draws))
