"""A runner without a model: its next token is a function of all tokens before, read back from the cache blocks."""

from engine_worker.step import Draw, Drawn, Slice, Step
from sluice.ring.errors import ErrorCode, Fault
from sluice.ring.params import SamplingParams, derive_seed
from sluice.ring.wire import TokenLogprob

MASK = (1 << 64) - 1
VOCAB = 97


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

    `violations` lists what no attention would survive: unwritten slots, tokens of others, draws that do not match.
    """

    def __init__(self, num_blocks: int, tokens_per_block: int) -> None:
        self.num_blocks = num_blocks
        self.num_host_blocks = 0
        self.window: int | None = None
        self.tokens_per_block = tokens_per_block
        self.choices = {"device": "none"}
        self.steps: list[Step] = []
        self.computed = 0
        self.violations: list[str] = []
        self.fail: str | None = None
        """"before" or "after" computing: the next step raises."""
        self.faults: set[tuple[int, int]] = set()
        """(seed, sequence) whose next draw fails."""
        self._slots: list[tuple[int, int] | None] = [None] * (num_blocks * tokens_per_block)

    def run(self, step: Step) -> list[Drawn]:
        fail, self.fail = self.fail, None
        self.steps.append(Step(tuple(freeze(part) for part in step.slices), step.moves))
        if fail == "before":
            raise RuntimeError("out of luck")
        self._copy(step)
        for part in step.slices:
            self._write(part)
        contexts = [self._read(part) for part in step.slices]
        drawn = [
            self._draw(tokens, draw) for part, tokens in zip(step.slices, contexts, strict=True) for draw in part.draws
        ]
        if fail == "after":
            raise RuntimeError("out of luck")
        return drawn

    def _slot(self, part: Slice, position: int) -> int:
        size = self.tokens_per_block
        return part.block_table[position // size] * size + position % size

    def _copy(self, step: Step) -> None:
        size = self.tokens_per_block
        for _, source, target in step.moves:
            self._slots[target * size : (target + 1) * size] = self._slots[source * size : (source + 1) * size]

    def _write(self, part: Slice) -> None:
        if not part.tokens:
            self.violations.append("a slice without tokens")
        state = 0
        if part.start:
            before = self._slots[self._slot(part, part.start - 1)]
            state = before[1] if before else -1
        for position, token in enumerate(part.tokens, part.start):
            state = mix(state, token)
            self._slots[self._slot(part, position)] = (token, state)
            self.computed += 1

    def _read(self, part: Slice) -> list[int]:
        """The tokens that the slice's context holds."""
        state, tokens = 0, []
        for position in range(part.start + len(part.tokens)):
            found = self._slots[self._slot(part, position)]
            state = mix(state, found[0]) if found else 0
            if found is None or found[1] != state:
                self.violations.append(f"position {position} of {part} holds {found}")
                break
            tokens.append(found[0])
        return tokens

    def _draw(self, tokens: list[int], draw: Draw) -> Drawn:
        if tokens != [*draw.prompt, *draw.output][: len(tokens)] or len(draw.output) != draw.position:
            self.violations.append(f"{draw} from {tokens}")
        if len(tokens) != len(draw.prompt) + len(draw.output):
            self.violations.append(f"{draw} after {len(tokens)} tokens")
        if (draw.sampling.seed, draw.sequence) in self.faults:
            return Drawn(0, fault=Fault(ErrorCode.NOTHING_TO_SAMPLE.name, "everything is masked"))
        seed = derive_seed(draw.sampling.seed, draw.sequence)
        token = choose(digest(tokens), seed, draw.position, draw.banned)
        return Drawn(token, logprob_of(token, draw.sampling))


def logprob_of(token: int, sampling: SamplingParams) -> TokenLogprob | None:
    return None if sampling.logprobs is None else TokenLogprob(-token / VOCAB, 1, [])


def freeze(part: Slice) -> Slice:
    return Slice(tuple(part.tokens), part.start, tuple(part.block_table), part.draws)
