"""The requests of the streams: one kind for each feature."""

import json
from collections.abc import Mapping
from itertools import cycle
from typing import Any

import msgspec
import numpy as np

PROMPTS = (
    "def fibonacci(n):\n",
    "import json\n\n\ndef load(path):\n",
    "class Stack:\n    def __init__(self):\n",
    "# Sort a list of words by length.\n",
    "for line in open(path):\n",
    "def main() -> None:\n    parser = argparse.ArgumentParser(",
)
SCHEMA = json.dumps(
    {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"name": {"type": "string", "maxLength": 8}, "value": {"type": "integer"}},
            "required": ["name", "value"],
            "additionalProperties": False,
        },
        "minItems": 5,
    }
)
RANDOM = np.random.default_rng(1)
DRAFT_LOGITS = RANDOM.normal(0.0, 2.0, (24, 4096)).astype(np.float16)
"""Logits for `draft_logits`, from which the draft tokens were sampled. The model accepts a few of these tokens."""
DRAFT = (DRAFT_LOGITS + RANDOM.gumbel(size=DRAFT_LOGITS.shape)).argmax(axis=1).tolist()
TABLE = RANDOM.normal(0.0, 0.5, (12, 256)).astype(np.float32)
"""Rows of embeddings before the prompt."""
PROMPT_ROWS = RANDOM.normal(0.0, 0.5, (20, 256)).astype(np.float32)
"""Rows of a prompt adapter."""
KINDS: Mapping[str, Mapping[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "top_p": 0.95},
    "n = 2": {"temperature": 0.9, "n": 2},
    "stop strings": {"temperature": 0.8, "stop": ["\n\n\n", "return None", "# end"], "min_tokens": 20},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": 0.2},
    "logprobs": {"temperature": 0.6, "logprobs": 2},
    "prompt logprobs": {"temperature": 0.6, "prompt_logprobs": 2, "n": 2},
    "n-grams": {"temperature": 0.8, "no_repeat_ngram_size": 2, "bad_words": ["return", "self.", "import os"]},
    "processor": {"temperature": 0.9, "logits_processors": ["no_repeats"], "logprobs": 1},
    "drafts": {"temperature": 0.3, "speculation": {"max_draft_tokens": 6}},
    "drafts, penalties": {"temperature": 0.0, "speculation": {"max_draft_tokens": 4}, "frequency_penalty": 0.1, "n": 2},
    "draft logits": {
        "temperature": 1.0,
        "top_k": 500,
        "speculation": {"draft_token_ids": DRAFT, "draft_logits": DRAFT_LOGITS, "max_draft_tokens": 4},
    },
    "prompt table": {"temperature": 0.7, "prompt_table": TABLE, "n": 2},
    "guided": {"temperature": 0.8, "guided": {"json_schema": SCHEMA}, "logprobs": 1},
    "guided, drafts": {
        "temperature": 0.2,
        "guided": {"regex": r"(\[[a-z]{3}, [0-9]{2}\] ){12,30}end"},
        "speculation": {"max_draft_tokens": 5},
        "frequency_penalty": 0.05,
    },
    "beams": {"n": 2, "beam_search": {"width": 4}, "logprobs": 1},
    "tensors": {
        "temperature": 0.8,
        "n": 2,
        "generation_logits": True,
        "tensors": [{"name": "hidden_states", "context": True}],
    },
}
ANY_MODEL: Mapping[str, Mapping[str, Any]] = {
    **{kind: options for kind, options in KINDS.items() if kind not in ("draft logits", "prompt table", "tensors")},
    "hidden states": {"temperature": 0.8, "n": 2, "tensors": [{"name": "hidden_states", "context": True}]},
}
"""Without arrays whose size is that of the bundled model, and without logits, which are large in other models."""
REPEATED: Mapping[str, int] = {"prompt logprobs": 40, "tensors": 40, "hidden states": 40}
"""Repetitions of the prompt, by kind, so that a death may happen while the prompt is computed. Default: one."""


class StreamRequest(msgspec.Struct, frozen=True):
    kind: str
    prompt: str | list[int]
    options: dict[str, Any]


def in_turns(kinds: Mapping[str, Mapping[str, Any]], streams: int, max_tokens: int) -> list[StreamRequest]:
    """Requests of all kinds and prompts in turns, each with a different seed, so that no two requests are equal."""
    found = []
    for i, (kind, options) in zip(range(streams), cycle(kinds.items()), strict=False):
        common = {"max_tokens": max_tokens, "ignore_eos": True, "seed": 1000 + i, "token_ids": True}
        prompt = PROMPTS[i // len(kinds) % len(PROMPTS)] * REPEATED.get(kind, 1)
        found.append(StreamRequest(kind, prompt, {**common, **options}))
    return found
