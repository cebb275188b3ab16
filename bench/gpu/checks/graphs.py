"""Generation steps by CUDA graphs against eager ones, of batches that fit a graph and that are padded."""

from bench.gpu.checks.chosen import fallbacks
from bench.gpu.checks.steps import same_steps
from bench.gpu.findings import Check
from bench.gpu.served import Served


def check(graphs: Served, eager: Served, sizes: tuple[int, ...], longest: int) -> Check:
    """The same, step by step. It does not hold on a GPU where there are no graphs."""
    name = f"graphs = eager, {graphs.shape.name}"
    if missing := fallbacks(graphs.runner.choices).get("cuda_graphs"):
        return Check(name, passed=False, detail=missing)
    found = same_steps(graphs, eager, sizes, longest)
    batches = ", ".join(map(str, sizes))
    detail = f"graphs: {graphs.runner.choices['cuda_graphs']}; batches of {batches}; {found}"
    return Check(name, found.passed, detail)
