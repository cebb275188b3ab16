"""What an engine computes of given texts, compared with what it should compute."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine_worker.backend import load_runner
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.runner import ModelRunner
from engine_worker.step import Draw, Slice
from sluice.checkpoint.folder import open_checkpoint
from sluice.wire.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
CHUNK = 32
"""Tokens of a text that are computed together."""

Texts = Sequence[Sequence[int]]
"""All of one length."""


class Quality(NamedTuple):
    perplexity: float
    divergence: float
    """Mean Kullback-Leibler divergence from the reference, in nats per token."""
    same: float
    """Fraction of the tokens for which it would choose the token that the reference chooses."""


def quality(reference: torch.Tensor, found: torch.Tensor, texts: Texts) -> Quality:
    """Of log probabilities [texts, tokens, vocab]."""
    divergence = (reference.exp() * (reference - found)).sum(-1).mean()
    same = (reference.argmax(-1) == found.argmax(-1)).float().mean()
    return Quality(perplexity(found, texts), float(divergence), float(same))


def perplexity(found: torch.Tensor, texts: Texts) -> float:
    following = torch.tensor([list(text[1:]) for text in texts]).unsqueeze(2)
    return math.exp(-float(found[:, :-1].gather(2, following).mean()))


@torch.inference_mode()
def log_probabilities(model: Path, settings: Mapping[str, Any], texts: Texts) -> torch.Tensor:
    """By an engine with these settings: [texts, tokens, vocab]."""
    runner = _runner(model, len(texts) * (len(texts[0]) + CHUNK), settings)
    forward, each = runner._forward, runner.num_blocks // len(texts)
    found = []
    for index, text in enumerate(texts):
        blocks, rows = range(each * index, each * index + each), []
        for start in range(0, len(text), CHUNK):
            part = list(text[start : start + CHUNK])
            # A slice with drafts has the logits of each of its tokens.
            draws = (Draw(GREEDY, 0, 0),) * len(part)
            slices = [Slice(part, start, blocks, draws, drafts=len(part) - 1)]
            logits = forward.logits((), forward.prepare(forward.arrays(slices)))
            if logits is None:
                raise RuntimeError("the step has no logits")
            rows.append(logits.log_softmax(-1))
        found.append(torch.cat(rows))
    return torch.stack(found)


def _runner(model: Path, tokens: int, settings: Mapping[str, Any]) -> ModelRunner:
    def ignore(*_: object) -> None: ...

    config = RunnerConfig("cpu", kv_cache_tokens=tokens, **settings)
    return load_runner(open_checkpoint(str(model)), config, ignore, ignore, ignore)
