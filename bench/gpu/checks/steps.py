"""Two runners step by step: batches of several sizes, of changing members of one pool, so that whatever a padding row
wrote would be found."""

import random

from bench.gpu.compare import TOLERANCES, Verdict, verdict
from bench.gpu.core import random_prompts
from bench.gpu.served import Served
from bench.gpu.walk import Walk
from engine_worker.step import Drawn

CHUNK = 256
"""Of prompts."""


def same_steps(ours: Served, theirs: Served, sizes: tuple[int, ...], longest: int, slack: float = 1.0) -> Verdict:
    """The same sequences, the same tokens; generation steps of these sizes, up and down again. `slack`: by how much the
    usual tolerance is multiplied."""
    source = random.Random(1)
    count = max(sizes)
    lengths = [source.randint(1, longest) for _ in range(count)]
    prompts = [random_prompts(1, length, ours.shape.vocab_size, i)[0] for i, length in enumerate(lengths)]
    room = 2 * len(sizes) + 1
    pairs: list[tuple[Drawn, Drawn]] = []
    walks = [Walk(one.runner, prompts, room) for one in (ours, theirs)]
    pairs += zip(*(walk.read_prompts(CHUNK) for walk in walks), strict=True)
    for size in (*sizes, *sizes[::-1]):
        members = source.sample(range(count), size)
        tokens = {i: source.randrange(ours.shape.vocab_size) for i in members}
        pairs += zip(*(walk.generate(tokens) for walk in walks), strict=True)
    return verdict(pairs, slack * TOLERANCES[ours.runner.choices["dtype"]])
