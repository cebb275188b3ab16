"""The requests of a load: random prompts, or prompts from a file."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Common English words, each one token for most tokenizers.
TEXT = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by word but "
    "not what all were we when your can said there use an each which she do how their if will up other about out many "
    "then them these so some her would make like him into time has look two more write go see number no way could "
    "people my than first water been call who oil its now find long down day did get come made may part"
)
WORDS = tuple(TEXT.split())
CALIBRATION_WORDS = 64
"""Words in the prompt that measures the tokens per word of the server's tokenizer."""
MAX_TOKENS = 1 << 20
"""Limit on the lengths in a file of requests."""


class WorkloadError(ValueError):
    """A load that cannot be sent; the message names the cause."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Mean lengths in tokens. With `spread` s, lengths are uniformly distributed from 1 - s to 1 + s times the mean."""

    prompt: int
    output: int
    spread: float = 0.0


def random_requests(
    count: int, lengths: Lengths, tokens_per_word: float, seed: int, variant: object = ""
) -> list[Request]:
    """Prompts of random words, whose common prefixes are too short for a prefix cache to help.

    Another variant has other words, and the same lengths.
    """
    length_rng, word_rng = random.Random(seed), random.Random(f"{seed} {variant}")
    return [
        Request(words(_spread(length_rng, lengths.prompt, lengths.spread), tokens_per_word, word_rng), output)
        for output in (_spread(length_rng, lengths.output, lengths.spread) for _ in range(count))
    ]


def words(tokens: int, tokens_per_word: float, rng: random.Random) -> str:
    """A text of random words with about this number of tokens."""
    return " ".join(rng.choices(WORDS, k=max(1, round(tokens / tokens_per_word))))


def read_requests(path: Path, count: int, lengths: Lengths, tokens_per_word: float, seed: int) -> list[Request]:
    """Read requests from JSON lines, each with `prompt` or `prompt_tokens`, and optionally `output_tokens`. If there
    are fewer lines than `count`, they are repeated.

    Raises WorkloadError.
    """
    rng = random.Random(seed)
    entries = list(_entries(path))
    if not entries:
        raise WorkloadError(f"{path} has no requests")
    return [_request(entries[i % len(entries)], lengths, tokens_per_word, rng) for i in range(count)]


def _request(entry: dict[str, Any], lengths: Lengths, tokens_per_word: float, rng: random.Random) -> Request:
    prompt = entry.get("prompt")
    if prompt is None:
        prompt = words(entry["prompt_tokens"], tokens_per_word, rng)
    return Request(prompt, entry.get("output_tokens", lengths.output))


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise WorkloadError(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield _entry(line, f"{path}, line {number}")


def _entry(line: str, where: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where}: not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise WorkloadError(f"{where}: not a JSON object")
    if unknown := entry.keys() - {"prompt", "prompt_tokens", "output_tokens"}:
        raise WorkloadError(f"{where}: unknown fields {', '.join(sorted(unknown))}")
    if ("prompt" in entry) == ("prompt_tokens" in entry):
        raise WorkloadError(f"{where}: give either prompt or prompt_tokens")
    if not isinstance(entry.get("prompt", ""), str):
        raise WorkloadError(f"{where}: prompt is not a string")
    for name in ("prompt_tokens", "output_tokens"):
        value = entry.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
            raise WorkloadError(f"{where}: {name} must be an integer from 1 to {MAX_TOKENS} (got {value!r})")
    return entry


def _spread(rng: random.Random, length: int, spread: float) -> int:
    return rng.randint(max(1, round(length * (1 - spread))), max(1, round(length * (1 + spread))))
