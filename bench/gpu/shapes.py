"""Model shapes, and folders of them without weights."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.harness.models import QWEN3_06B, TINY

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""Folders need one to be opened; no text is made."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model without weights."""

    name: str
    config: Mapping[str, Any]
    """config.json."""

    @classmethod
    def read(cls, path: Path) -> "Shape":
        """What `write` has written."""
        return cls(path.name, json.loads((path / "config.json").read_text(encoding="utf-8")))

    def write(self, folder: Path) -> Path:
        """As a model folder within `folder`."""
        path = folder / self.name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(dict(self.config)), encoding="utf-8")
        for name in TOKENIZER:
            shutil.copy(TINY / name, path)
        return path

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])

    @property
    def embedding(self) -> int:
        """Weights that a step does not read whole: of an embedding that is not the head too."""
        return 0 if self.config["tie_word_embeddings"] else self.vocab_size * int(self.config["hidden_size"])

    @property
    def matrices(self) -> int:
        """Weights of the layers' linear maps, which each token is multiplied with."""
        c = self.config
        heads, kv_heads, size = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"]
        attention = size * c["head_dim"] * (2 * heads + 2 * kv_heads)
        return int(c["num_hidden_layers"] * (attention + 3 * size * c["intermediate_size"]))

    @property
    def weights(self) -> int:
        """All that count."""
        return self.matrices + self.vocab_size * int(self.config["hidden_size"]) + self.embedding

    @property
    def head_sizes(self) -> int:
        """Elements of the queries of a token, over all layers."""
        c = self.config
        return int(c["num_hidden_layers"] * c["num_attention_heads"] * c["head_dim"])

    @property
    def kv_elements(self) -> int:
        """Of the keys and values of a token, over all layers."""
        c = self.config
        return int(2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"])


def tiny() -> Shape:
    """Of the model in the box."""
    return Shape("tiny", json.loads((TINY / "config.json").read_text(encoding="utf-8")))


SMALL = Shape(
    "Qwen3-0.6B",
    QWEN3_06B
    | {"dtype": "bfloat16", "torch_dtype": "bfloat16", "initializer_range": 0.02, "max_position_embeddings": 40960},
)
LARGE = Shape(
    "Qwen3-8B",
    dict(SMALL.config)
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "tie_word_embeddings": False,
    },
)
