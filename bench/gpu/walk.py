"""Sequences led through a runner step by step: who is in a step, and with which token, is given, not scheduled."""

import random
from collections.abc import Mapping, Sequence

from engine_worker.step import Draw, Drawn, Runner, Slice, Step
from sluice.ring.params import SamplingParams

ALTERNATIVES = 20
"""Reported with each token."""
GREEDY = SamplingParams(temperature=0.0, logprobs=ALTERNATIVES)


class Walk:
    """Sequences whose blocks lie scattered over the pool, the first block included."""

    def __init__(self, runner: Runner, prompts: Sequence[Sequence[int]], room: int, seed: int = 0) -> None:
        """`room`: tokens after each prompt. Raises ValueError where the pool is too small."""
        self._runner = runner
        self.tokens = [list(prompt) for prompt in prompts]
        self._prompts = [len(prompt) for prompt in prompts]
        self._computed = [0] * len(prompts)
        counts = [-(-(len(prompt) + room) // runner.tokens_per_block) for prompt in prompts]
        blocks = list(range(sum(counts)))
        if len(blocks) > runner.num_blocks:
            raise ValueError(f"{len(blocks)} blocks are needed, the pool has {runner.num_blocks}")
        random.Random(seed).shuffle(blocks)
        self._tables = [[blocks.pop() for _ in range(count)] for count in counts]

    def read_prompts(self, chunk: int) -> list[Drawn]:
        """In chunks, one sequence after the other; what each draws after its prompt."""
        found = []
        for i in range(len(self.tokens)):
            while len(self.tokens[i]) - self._computed[i] > chunk:
                self._runner.launch(Step((self._slice(i, chunk, last=False),))).collect()
                self._computed[i] += chunk
            found += self.step([i])
        return found

    def generate(self, tokens: Mapping[int, int]) -> list[Drawn]:
        """Sequences, by number, go on with these tokens, in one step; what each draws after it."""
        for i, token in tokens.items():
            self.tokens[i].append(token)
        return self.step(list(tokens))

    def step(self, members: Sequence[int]) -> list[Drawn]:
        """Whatever these have that is not computed."""
        counts = [len(self.tokens[i]) - self._computed[i] for i in members]
        slices = tuple(self._slice(i, count, last=True) for i, count in zip(members, counts, strict=True))
        drawn = self._runner.launch(Step(slices)).collect()
        for i, count in zip(members, counts, strict=True):
            self._computed[i] += count
        return drawn

    def _slice(self, i: int, count: int, *, last: bool) -> Slice:
        start, split = self._computed[i], self._prompts[i]
        tokens = self.tokens[i]
        draw = Draw(GREEDY, i, len(tokens) - split, tokens[:split], tokens[split:])
        return Slice(tokens[start : start + count], start, self._tables[i], (draw,) if last else ())
