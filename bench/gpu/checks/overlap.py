"""The engine's loop with overlap against without."""

import random

from bench.gpu.compare import TOLERANCES, together, verdict
from bench.gpu.core import Ask, Core, random_prompts
from bench.gpu.findings import Check
from bench.gpu.served import Served
from bench.gpu.walk import ALTERNATIVES


def check(ahead: Served, plain: Served, requests: int, longest: int) -> Check:
    """Requests of many lengths, greedy. Two continuations may part at a near-tie; what comes after that has no
    counterpart."""
    source = random.Random(2)
    prompts = random_prompts(requests, longest, ahead.shape.vocab_size, seed=3)
    asks = [Ask(prompt[: source.randint(1, longest)], source.randint(1, longest)) for prompt in prompts]
    cores = [Core(served, logprobs=ALTERNATIVES) for served in (ahead, plain)]
    for core in cores:
        core.submit(asks)
        core.finish()
    both = [[core.drawn[number] for core in cores] for number in range(requests)]
    parted = sum(ours[-1] != theirs[-1] for ours, theirs in both)
    found = verdict((pair for ours, theirs in both for pair in together(ours, theirs)), _tolerance(plain))
    detail = f"{requests} requests, {parted} part at a near-tie; {found}"
    return Check(f"overlap = none, {ahead.shape.name}", found.passed, detail)


def _tolerance(served: Served) -> float:
    return TOLERANCES[served.runner.choices["dtype"]]
