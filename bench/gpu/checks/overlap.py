"""The engine's loop with overlap against without."""

import random

from bench.gpu.compare import TOLERANCES, Verdict, together, verdict
from bench.gpu.core import Ask, Core, random_prompts
from bench.gpu.findings import Check
from bench.gpu.served import Served
from bench.gpu.walk import GREEDY


def check(ahead: Served, plain: Served, requests: int, longest: int) -> Check:
    """Requests of many lengths, greedy."""
    found, parted = same_loops(ahead, plain, requests, longest)
    detail = f"{requests} requests, {parted} part at a near-tie; {found}"
    return Check(f"overlap = none, {ahead.shape.name}", found.passed, detail)


def same_loops(ours: Served, theirs: Served, requests: int, longest: int, slack: float = 1.0) -> tuple[Verdict, int]:
    """Two engines, each by its own loop; and how many continuations part. They may at a near-tie; what comes after that
    has no counterpart. `slack`: by how much the usual tolerance is multiplied."""
    source = random.Random(2)
    prompts = random_prompts(requests, longest, ours.shape.vocab_size, seed=3)
    asks = [Ask(prompt[: source.randint(1, longest)], source.randint(1, longest)) for prompt in prompts]
    cores = [Core(served, GREEDY) for served in (ours, theirs)]
    for core in cores:
        core.submit(asks)
        core.finish()
    both = [[core.drawn[number] for core in cores] for number in range(requests)]
    parted = sum(any(a.token != b.token for a, b in zip(*pair, strict=True)) for pair in both)
    tolerance = slack * TOLERANCES[theirs.runner.choices["dtype"]]
    return verdict((pair for mine, other in both for pair in together(mine, other)), tolerance), parted
