"""Generation steps by CUDA graphs against eager ones: batches of sizes that fit and that are padded, of changing
members of one pool, so that whatever a padding row wrote would be found."""

import random

from bench.gpu.compare import TOLERANCES, verdict
from bench.gpu.core import random_prompts
from bench.gpu.findings import Check
from bench.gpu.served import Served
from bench.gpu.walk import Walk
from engine_worker.step import Drawn

CHUNK = 256


def check(graphs: Served, eager: Served, sizes: tuple[int, ...], longest: int) -> Check:
    """The same sequences, the same tokens, step by step."""
    source = random.Random(1)
    count = max(sizes)
    lengths = [source.randint(1, longest) for _ in range(count)]
    prompts = [random_prompts(1, length, graphs.shape.vocab_size, i)[0] for i, length in enumerate(lengths)]
    room = 2 * len(sizes) + 1
    pairs: list[tuple[Drawn, Drawn]] = []
    walks = [Walk(one.runner, prompts, room) for one in (graphs, eager)]
    pairs += zip(*(walk.read_prompts(CHUNK) for walk in walks), strict=True)
    for size in (*sizes, *sizes[::-1]):
        members = source.sample(range(count), size)
        tokens = {i: source.randrange(graphs.shape.vocab_size) for i in members}
        pairs += zip(*(walk.generate(tokens) for walk in walks), strict=True)
    found = verdict(pairs, TOLERANCES[graphs.runner.choices["dtype"]])
    detail = f"graphs: {graphs.runner.choices['cuda_graphs']}; batches of {_listed(sizes)}; {found}"
    return Check(f"graphs = eager, {graphs.shape.name}", found.passed, detail)


def _listed(sizes: tuple[int, ...]) -> str:
    return ", ".join(map(str, sizes))
