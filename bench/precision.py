"""python -m bench.precision: quality of each precision with the bundled model, and CPU time per token of other models.

Prints the columns of the table in docs/operations.md.
"""

import argparse
import math
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer

from bench.tiny_model.corpus import read
from engine_worker.backend import load_runner
from engine_worker.openvino.compiled import has_bfloat16
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.runner import ModelRunner
from engine_worker.step import Draw, Slice, Step
from sluice import tiny_model
from sluice.checkpoint.folder import open_checkpoint
from sluice.wire.params import SamplingParams

Precision = tuple[str, str, str, str]
"""Values of the settings `backend`, `dtype`, `quantize`, `kv_precision`."""
PRECISIONS: tuple[Precision, ...] = (
    ("torch", "auto", "none", "auto"),
    ("openvino", "float32", "none", "float32"),
    ("openvino", "float32", "none", "float16"),
    ("openvino", "float32", "none", "u8"),
    ("openvino", "float32", "int8", "float32"),
    ("openvino", "float32", "int8", "u8"),
    ("openvino", "float32", "int4", "float32"),
    ("openvino", "float32", "int4", "u8"),
    ("openvino", "bfloat16", "none", "bfloat16"),
    ("openvino", "bfloat16", "int8", "bfloat16"),
    ("openvino", "bfloat16", "int8", "u8"),
)
TIMED = (0, 1, 4, 6, 8, 9)
"""Indices of PRECISIONS whose CPU time is measured."""
SEQUENCES, LENGTH = 64, 96
"""Perplexity: number of texts, and tokens of each."""
PROMPTS, PROMPT, GENERATED = 50, 64, 32
"""Greedy continuations: number of prompts, prompt tokens, generated tokens."""
CONTEXT, STEPS = 64, 24
"""Speed: prompt tokens of a sequence, and measured steps."""
GREEDY = SamplingParams(temperature=0.0)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.precision", description=__doc__)
    parser.add_argument("models", type=Path, nargs="*", help="folders of models whose CPU time is measured")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    quality(options.threads)
    for model in options.models:
        speed(model, options.threads, options.rounds)


def possible(precisions: Sequence[Precision]) -> list[Precision]:
    """The precisions that this CPU supports."""
    return [each for each in precisions if each[1] != "bfloat16" or has_bfloat16()]


def loaded(model: Path, precision: Precision, threads: int) -> ModelRunner:
    backend, dtype, quantize, kv_precision = precision
    tokens = SEQUENCES * (PROMPT + LENGTH + CONTEXT)
    config = RunnerConfig(
        "cpu",
        backend=backend,  # type: ignore[arg-type]
        dtype=dtype,  # type: ignore[arg-type]
        quantize=quantize,  # type: ignore[arg-type]
        kv_precision=kv_precision,  # type: ignore[arg-type]
        threads=threads,
        kv_cache_tokens=tokens,
    )
    ignore = lambda *_: None  # noqa: E731
    return load_runner(open_checkpoint(str(model), None), config, ignore, ignore, ignore)


def quality(threads: int) -> None:
    """Prints perplexity and greedy tokens of the bundled model, on files that were not in its training data."""
    held_out = "\n".join(read(0)[1].files)
    tokens = AutoTokenizer.from_pretrained(tiny_model.path())(held_out)["input_ids"]
    apart = len(tokens) // SEQUENCES
    texts = [tokens[apart * i : apart * i + LENGTH] for i in range(SEQUENCES)]
    expected: list[list[int]] | None = None
    for precision in possible(PRECISIONS):
        runner = loaded(tiny_model.path(), precision, threads)
        found = greedy(runner, [text[:PROMPT] for text in texts[:PROMPTS]])
        expected = expected or found
        same = sum(map(list.__eq__, found, expected))
        print(f"{', '.join(precision)}: perplexity {perplexity(runner, texts):.3f}, {same} of {PROMPTS}", flush=True)


@torch.inference_mode()
def perplexity(runner: ModelRunner, texts: list[list[int]]) -> float:
    """Perplexity of all tokens except the first of each text. All texts have the same length."""
    losses = []
    forward = runner._forward
    for position in range(LENGTH - 1):
        slices = _slices(runner, [[text[position]] for text in texts], position)
        logits = forward.logits((), forward.prepare(forward.arrays(slices)))
        if logits is None:
            raise RuntimeError("the step has no logits")
        following = torch.tensor([text[position + 1] for text in texts])
        losses.append(torch.nn.functional.cross_entropy(logits, following))
    return math.exp(torch.stack(losses).mean())


def greedy(runner: ModelRunner, prompts: list[list[int]]) -> list[list[int]]:
    """The greedy continuation of each prompt."""
    found: list[list[int]] = [[] for _ in prompts]
    parts, start = prompts, 0
    for _ in range(GENERATED):
        drawn = runner.run(Step(tuple(_slices(runner, parts, start))))
        start += len(parts[0])
        parts = [[each.token] for each in drawn]
        found = [tokens + part for tokens, part in zip(found, parts, strict=True)]
    return found


def speed(model: Path, threads: int, rounds: int) -> None:
    """Prints CPU milliseconds per generated token: medians of rounds in turns."""
    precisions = possible([PRECISIONS[index] for index in TIMED])
    runners = [loaded(model, precision, threads) for precision in precisions]
    for count in (32, 1):
        taken: list[list[float]] = [[] for _ in runners]
        for _ in range(rounds + 1):
            for times, runner in zip(taken, runners, strict=True):
                times.append(_seconds_per_token(runner, count))
        for precision, times in zip(precisions, taken, strict=True):
            text = f"{1000 * statistics.median(times[1:]):.3f} ms of CPU time a token"
            print(f"{model.name}, {', '.join(precision)}, {count} sequences: {text}", flush=True)


def _seconds_per_token(runner: ModelRunner, count: int) -> float:
    for context in _slices(runner, [[3] * CONTEXT] * count, 0):
        runner.run(Step((context,)))
    start = time.process_time()
    for number in range(STEPS):
        runner.run(Step(tuple(_slices(runner, [[5]] * count, CONTEXT + number))))
    return (time.process_time() - start) / STEPS / count


def _slices(runner: ModelRunner, parts: list[list[int]], start: int) -> list[Slice]:
    """One slice per sequence, each with separate blocks."""
    each = runner.num_blocks // SEQUENCES
    return [Slice(part, start, range(each * i, each * i + each), (Draw(GREEDY, 0, 0),)) for i, part in enumerate(parts)]


if __name__ == "__main__":
    main()
