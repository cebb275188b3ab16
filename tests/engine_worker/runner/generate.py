"""Generates whole outputs with a runner alone, without an engine."""

from engine_worker.protocol import Runner
from engine_worker.sampling.logit_rules import build_logit_rules
from engine_worker.step import Draw, Slice, Step
from sluice.wire.params import SamplingParams


class Sequence:
    """One sequence with a private block table."""

    def __init__(self, prompt: list[int], blocks: list[int], sampling: SamplingParams) -> None:
        self.prompt = prompt
        self.blocks = blocks
        self.sampling = sampling
        self.output: list[int] = []
        (self.rules,) = build_logit_rules(sampling, prompt)
        self.computed = 0

    def slice(self, chunk: int) -> Slice:
        """The next tokens, at most `chunk`; with a draw if they reach the end."""
        tokens = self.prompt + self.output
        part = tokens[self.computed : self.computed + chunk]
        ends = self.computed + len(part) == len(tokens)
        draw = Draw(self.sampling, 0, len(self.output), self.output, self.rules)
        start, self.computed = self.computed, self.computed + len(part)
        return Slice(part, start, self.blocks, (draw,) if ends else ())


def generate(
    runner: Runner, prompts: list[list[int]], max_tokens: int, *, chunk: int = 1 << 20, **sampling: object
) -> list[list[int]]:
    """Generate for all prompts together; their block tables are interleaved."""
    blocks_per_prompt = runner.num_blocks // len(prompts)
    params = SamplingParams(**sampling)
    sequences = [
        Sequence(prompt, list(range(i, blocks_per_prompt * len(prompts), len(prompts)))[::-1], params)
        for i, prompt in enumerate(prompts)
    ]
    while live := [sequence for sequence in sequences if len(sequence.output) < max_tokens]:
        slices = [sequence.slice(chunk) for sequence in live]
        drawn = iter(runner.run(Step(tuple(slices))))
        for sequence, part in zip(live, slices, strict=True):
            sequence.output += [next(drawn).token for _ in part.draws]
    return [sequence.output for sequence in sequences]
