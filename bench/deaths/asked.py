"""Requests of every kind whose continuation has to be rebuilt from the tokens so far."""

from collections.abc import Mapping
from typing import Any

import msgspec

PROMPTS = (
    "def fibonacci(n):\n",
    "import json\n\n\ndef load(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "# Sort a list of words by length.\n",
    "for line in open(path):\n",
    "def main() -> None:\n    parser = argparse.ArgumentParser(",
)
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95},
    "n = 2": {"temperature": 0.9, "n": 2},
    "stop strings": {"temperature": 0.8, "stop": ["\n\n\n", "return None", "# end"], "min_tokens": 20},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0.6, "logprobs": 2},
}


class Asked(msgspec.Struct, frozen=True):
    """One request."""

    kind: str
    prompt: str
    options: dict[str, Any]


def mixed(count: int, max_tokens: int) -> list[Asked]:
    """Kinds and prompts in turns, each with its own seed, so that no two are the same."""
    kinds = list(KINDS.items())
    found = []
    for i in range(count):
        kind, options = kinds[i % len(kinds)]
        common = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1000 + i, "token_ids": True}
        found.append(Asked(kind, PROMPTS[i // len(kinds) % len(PROMPTS)], {**common, **options}))
    return found
