"""The requests of a load: of random lengths, or from a file."""

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
MAX_TOKENS = 1 << 20


class WorkloadError(ValueError):
    """A load that cannot be sent; the message names the cause."""


@dataclass(frozen=True, slots=True)
class Request:
    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """In tokens; `spread` s draws each evenly from (1 - s) to (1 + s) times the length."""

    prompt: int
    output: int
    spread: float = 0.0


def random_requests(
    count: int, lengths: Lengths, tokens_per_word: float, seed: int, variant: object = ""
) -> list[Request]:
    """Prompts of random words: they share too little with each other for a prefix cache to help.

    Variants have other words, and the same lengths.
    """
    sizes, choice = random.Random(seed), random.Random(f"{seed} {variant}")
    return [
        Request(words(_spread(sizes, lengths.prompt, lengths.spread), tokens_per_word, choice), output)
        for output in (_spread(sizes, lengths.output, lengths.spread) for _ in range(count))
    ]


def words(tokens: int, tokens_per_word: float, draw: random.Random) -> str:
    """A text of about so many tokens."""
    return " ".join(draw.choices(WORDS, k=max(1, round(tokens / tokens_per_word))))


def read_requests(path: Path, count: int, lengths: Lengths, tokens_per_word: float, seed: int) -> list[Request]:
    """From JSON lines with `prompt` or `prompt_tokens`, and maybe `output_tokens`; repeated if there are too few.

    Raises WorkloadError.
    """
    draw = random.Random(seed)
    found = list(_entries(path))
    if not found:
        raise WorkloadError(f"{path} has no lines")
    return [_request(found[i % len(found)], lengths, tokens_per_word, draw) for i in range(count)]


def _request(entry: dict[str, Any], lengths: Lengths, tokens_per_word: float, draw: random.Random) -> Request:
    prompt = entry.get("prompt")
    if prompt is None:
        prompt = words(entry["prompt_tokens"], tokens_per_word, draw)
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
        raise WorkloadError(f"{where}: needs either prompt or prompt_tokens")
    if not isinstance(entry.get("prompt", ""), str):
        raise WorkloadError(f"{where}: prompt is not a string")
    for name in ("prompt_tokens", "output_tokens"):
        value = entry.get(name, 1)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_TOKENS:
            raise WorkloadError(f"{where}: {name} is {value!r}, must be an integer from 1 to {MAX_TOKENS}")
    return entry


def _spread(draw: random.Random, length: int, spread: float) -> int:
    return draw.randint(max(1, round(length * (1 - spread))), max(1, round(length * (1 + spread))))
