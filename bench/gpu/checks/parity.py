"""Greedy continuations against transformers on the same random weights.

Both round; transformers in float32 hardly does. So it is asked twice, in the model's dtype and in float32: how far the
former is off is what rounding does, and the engine may be off three times as far.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu.compare import TOLERANCES, alternatives
from bench.gpu.core import random_prompts
from bench.gpu.findings import Check
from bench.gpu.served import Served
from bench.gpu.twin import twin
from bench.gpu.walk import Walk
from engine_worker.step import Drawn

SLACK = 3.0
"""How far the engine may be off, by how far transformers in the same dtype is."""
CHUNK = 100
"""Of prompts: longer ones come in several steps."""


def check(served: Served, device: torch.device, lengths: Sequence[int], steps: int) -> Check:
    """Prompts of these lengths, and so many tokens after each."""
    prompts = [random_prompts(1, length, served.shape.vocab_size, seed)[0] for seed, length in enumerate(lengths)]
    walk = Walk(served.runner, prompts, steps + 1)
    drawn = [walk.read_prompts(CHUNK)]
    for _ in range(steps):
        drawn.append(walk.generate({i: one.token for i, one in enumerate(drawn[-1])}))
    model = twin(served, device)
    rounded = [_logprobs(model, tokens, steps + 1, device) for tokens in walk.tokens]
    exact = rounded
    if served.dtype != torch.float32:
        model.float()
        exact = [_logprobs(model, tokens, steps + 1, device) for tokens in walk.tokens]
    ours = [[step[i] for step in drawn] for i in range(len(prompts))]
    return _judge(served, ours, rounded, exact)


def _judge(served: Served, ours: list[list[Drawn]], rounded: list[Tensor], exact: list[Tensor]) -> Check:
    off, noise, leads = 0.0, 0.0, []
    for drawn, *rows in zip(ours, rounded, exact, strict=True):
        for one, near, right in zip(drawn, *rows, strict=True):
            found = alternatives(one)
            ids = torch.tensor(list(found), device=right.device, dtype=torch.long)
            mine = torch.tensor(list(found.values()), device=right.device)
            off = max(off, _largest(mine - right[ids]))
            noise = max(noise, _largest(near[ids] - right[ids]))
            first, second = right.topk(2).values.tolist()
            leads.append((first - second, one.token == int(right.argmax())))
    allowed = max(SLACK * noise, TOLERANCES["float32"])
    clear = [same for lead, same in leads if lead > 2 * allowed]
    detail = (
        f"{len(leads)} tokens: logprobs are off by {off:.2g} at most (transformers itself {noise:.2g}, allowed "
        f"{allowed:.2g}); {sum(clear)} of {len(clear)} clear choices agree"
    )
    return Check(f"greedy = transformers, {served.shape.name}", off <= allowed and all(clear), detail)


def _largest(differences: Tensor) -> float:
    """Infinite where there is none to look at, for nothing was drawn then."""
    return float(differences.abs().nan_to_num(nan=torch.inf).max()) if len(differences) else torch.inf


@torch.inference_mode()
def _logprobs(model: Any, tokens: list[int], count: int, device: torch.device) -> Tensor:
    """[count, vocab] float32: after each of the last `count` tokens."""
    logits = model(torch.tensor([tokens], device=device), logits_to_keep=count).logits[0]
    return logits.float().log_softmax(dim=-1)
