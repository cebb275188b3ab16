"""A runner without a model: its next token is a function of all tokens before, read back from the cache blocks."""

from collections.abc import Iterable

from engine_worker.step import Draw, Drawn, Move, MoveKind, Slice, Step
from sluice.ring.errors import ErrorCode, Fault
from sluice.ring.params import SamplingParams, derive_seed
from sluice.ring.wire import TokenLogprob

MASK = (1 << 64) - 1
VOCAB = 97

Slot = tuple[int, int] | None
"""A token, and the digest of all up to it."""


def mix(state: int, value: int) -> int:
    state = ((state ^ value) * 6364136223846793005 + 1442695040888963407) & MASK
    return state ^ (state >> 29)


def digest(tokens) -> int:
    state = 0
    for token in tokens:
        state = mix(state, token)
    return state


def choose(state: int, seed: int, position: int, banned=()) -> int:
    """The next token after tokens with this digest."""
    noise = mix(mix(state, seed), position)
    while noise % VOCAB in banned:
        noise = mix(noise, 1)
    return noise % VOCAB


def continuation(prompt, stopping, seed: int = 0, sequence: int = 0) -> list[int]:
    """What an undisturbed sequence gets."""
    state, output = digest(prompt), []
    ends = stopping.eos_token_ids + stopping.stop_token_ids
    while len(output) < stopping.max_tokens:
        banned = ends if len(output) < stopping.min_tokens else ()
        output.append(choose(state, derive_seed(seed, sequence), len(output), banned))
        state = mix(state, output[-1])
        if output[-1] in ends and len(output) > stopping.min_tokens:
            break
    return output


class ScriptedRunner:
    """Keeps (token, digest up to it) in every slot and reads whole contexts back through the block tables.

    With a window it reads only the last tokens. `violations` lists what no attention would survive: unwritten slots,
    tokens of others, draws that do not match.
    """

    def __init__(
        self, num_blocks: int, tokens_per_block: int, num_host_blocks: int = 0, window: int | None = None
    ) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = num_host_blocks
        self.window = window
        self.tokens_per_block = tokens_per_block
        self.choices = {"device": "none"}
        self.steps: list[Step] = []
        self.computed = 0
        self.violations: list[str] = []
        self.fail: str | None = None
        """"before" or "after" computing: the next step raises."""
        self.fail_moving = False
        """The next step that brings blocks to the device raises in the midst of that."""
        self.failures = 0
        """Steps that raised."""
        self.faults: set[tuple[int, int]] = set()
        """(seed, sequence) whose next draw fails."""
        self.blocks: list[list[Slot]] = [[None] * tokens_per_block for _ in range(num_blocks)]
        self.host_blocks: list[list[Slot]] = [[None] * tokens_per_block for _ in range(num_host_blocks)]

    def run(self, step: Step) -> list[Drawn]:
        fail, self.fail = self.fail, None
        self.steps.append(Step(tuple(freeze(part) for part in step.slices), step.moves))
        if fail == "before":
            self._raise()
        if self.fail_moving and any(move.kind is not MoveKind.OFFLOAD for move in step.moves):
            self.fail_moving = False
            self._move(step.moves[: len(step.moves) // 2])
            self._raise()
        self._move(step.moves)
        for part in step.slices:
            self._write(part)
        contexts = [self._read(part) for part in step.slices]
        drawn = [
            self._draw(*context, draw)
            for part, context in zip(step.slices, contexts, strict=True)
            for draw in part.draws
        ]
        if fail == "after":
            self._raise()
        return drawn

    def _raise(self) -> None:
        self.failures += 1
        raise RuntimeError("out of luck")

    def _move(self, moves: Iterable[Move]) -> None:
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
        state = 0
        if part.start:
            slots, offset = self._slots(part, part.start - 1)
            before = slots[offset]
            state = before[1] if before else -1
        for position, token in enumerate(part.tokens, part.start):
            state = mix(state, token)
            slots, offset = self._slots(part, position)
            slots[offset] = (token, state)
            self.computed += 1

    def _read(self, part: Slice) -> tuple[list[int], int]:
        """The tokens that the slice's context holds, as far as its first token sees, and the digest of all."""
        first = 0 if self.window is None else max(0, part.start - self.window + 1)
        state, tokens = 0, []
        for position in range(first, part.start + len(part.tokens)):
            slots, offset = self._slots(part, position)
            found = slots[offset]
            if found is not None:
                state = found[1] if position == first > 0 else mix(state, found[0])
            if found is None or found[1] != state:
                self.violations.append(f"position {position} of {part} holds {found}")
                break
            tokens.append(found[0])
        return tokens, state

    def _draw(self, tokens: list[int], state: int, draw: Draw) -> Drawn:
        expected = [*draw.prompt, *draw.output]
        seen = expected[len(expected) - len(tokens) :]
        if tokens != seen or state != digest(expected) or len(draw.output) != draw.position:
            self.violations.append(f"{draw} from {tokens}")
        if self.window is None and len(tokens) != len(expected):
            self.violations.append(f"{draw} after {len(tokens)} tokens")
        if (draw.sampling.seed, draw.sequence) in self.faults:
            return Drawn(0, fault=Fault(ErrorCode.NOTHING_TO_SAMPLE.name, "everything is masked"))
        seed = derive_seed(draw.sampling.seed, draw.sequence)
        token = choose(state, seed, draw.position, draw.banned)
        return Drawn(token, logprob_of(token, draw.sampling))


def logprob_of(token: int, sampling: SamplingParams) -> TokenLogprob | None:
    return None if sampling.logprobs is None else TokenLogprob(-token / VOCAB, 1, [])


def freeze(part: Slice) -> Slice:
    return Slice(tuple(part.tokens), part.start, tuple(part.block_table), part.draws)
