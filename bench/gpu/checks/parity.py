"""Greedy continuations against transformers on the same random weights.

Transformers computes them twice, in the model's dtype and in float32: the difference is the effect of rounding, and the
engine may deviate three times as far.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bench.gpu.checks.engine import TOLERANCES, Walk, alternatives
from bench.gpu.engine import SEED, Served, random_prompts
from bench.gpu.findings import Check
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.shard import Place
from engine_worker.models.qwen3 import Qwen3
from engine_worker.runner.weights import random_weights
from engine_worker.step import Drawn

SLACK = 3.0
"""Allowed deviation of the engine, by that of transformers in the same dtype."""
CHUNK = 100


def check_parity(served: Served, device: torch.device, lengths: Sequence[int], steps: int) -> Check:
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
    """Infinite without any: then nothing was drawn."""
    return float(differences.abs().nan_to_num(nan=torch.inf).max()) if len(differences) else torch.inf


@torch.inference_mode()
def _logprobs(model: Any, tokens: list[int], count: int, device: torch.device) -> Tensor:
    """[count, vocab] float32: after each of the last `count` tokens."""
    logits = model(torch.tensor([tokens], device=device), logits_to_keep=count).logits[0]
    return logits.float().log_softmax(dim=-1)


def blank(path: str, device: torch.device, dtype: torch.dtype) -> Any:
    """transformers' model of a folder's config.json, with weights of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(path), dtype=dtype).eval()


@torch.inference_mode()
def twin(served: Served, device: torch.device) -> Any:
    """transformers' model with the weights of a runner, drawn in the same order from the same seed."""
    model = blank(str(served.checkpoint.path), device, served.dtype)
    raw = served.checkpoint.config
    shape = Qwen3.read_config(raw)
    ours = Qwen3(shape, ReferenceAttention(shape.heads), Place(served.dtype, torch.device("meta")))
    theirs = dict(model.named_parameters())
    targets = {name: theirs[name] for name in ours.targets()}
    random_weights(targets, SEED, float(raw.get("initializer_range", 0.02)), lambda *_: None)
    return model
