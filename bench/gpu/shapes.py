"""Model shapes, as folders without weights, and the workload that the engine and its peers are compared on."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu.findings import Throughput
from bench.harness.models import QWEN3_06B, TINY

TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
"""Files required to open a folder as a checkpoint, although no text is generated."""


@dataclass(frozen=True, slots=True)
class Shape:
    name: str
    config: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> "Shape":
        return cls(path.name, json.loads((path / "config.json").read_text(encoding="utf-8")))

    def write(self, folder: Path) -> Path:
        """Write a model folder within `folder`, and return its path."""
        path = folder / self.name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(dict(self.config)), encoding="utf-8")
        for name in TOKENIZER:
            shutil.copy(TINY / name, path)
        return path

    @property
    def vocab_size(self) -> int:
        return int(self.config["vocab_size"])

    @property
    def embedding(self) -> int:
        """Elements of an embedding that is not tied to the head; a step reads only a few of its rows."""
        return 0 if self.config["tie_word_embeddings"] else self.head

    @property
    def matrices(self) -> int:
        """Elements of the layers' weight matrices by which every token is multiplied."""
        return self._attention + (
            round(self.experts * self._chosen) if self.experts else self._mlp("intermediate_size")
        )

    @property
    def experts(self) -> int:
        """Elements of all experts; 0 without experts. If there are any, all layers have them."""
        return int(self.config.get("num_experts", 0)) * self._mlp("moe_intermediate_size")

    @property
    def weights(self) -> int:
        """Elements of all weight matrices."""
        layers = self._attention + self.experts if self.experts else self.matrices
        return layers + self.head + self.embedding

    @property
    def head(self) -> int:
        return self.vocab_size * int(self.config["hidden_size"])

    def idle_share(self, tokens: int) -> float:
        """The mean share of experts that none of so many tokens chooses, if all are equally likely. Random weights make
        them nearly so."""
        return (1 - self._chosen) ** tokens

    @property
    def _chosen(self) -> float:
        """Share of a layer's experts that compute a token."""
        return float(self.config["num_experts_per_tok"] / self.config["num_experts"])

    @property
    def _attention(self) -> int:
        c = self.config
        heads = 2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"]
        return int(c["num_hidden_layers"] * c["hidden_size"] * c["head_dim"] * heads)

    def _mlp(self, width: str) -> int:
        """Elements of a SwiGLU in each layer. `width`: name of the option with its size."""
        return int(3 * self.config["num_hidden_layers"] * self.config["hidden_size"] * self.config.get(width, 0))

    @property
    def head_sizes(self) -> int:
        """Elements of a token's queries, over all layers."""
        return self._head_sizes("num_attention_heads")

    @property
    def kv_elements(self) -> int:
        """Elements of a token in the KV cache."""
        return 2 * self._head_sizes("num_key_value_heads")

    def _head_sizes(self, heads: str) -> int:
        return int(self.config["num_hidden_layers"] * self.config[heads] * self.config["head_dim"])


class Workload(NamedTuple):
    """Requests of random tokens, submitted together; EOS is ignored. Greedy, if the system supports it."""

    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def seeds(self) -> range:
        """Seeds for the prompts of each round. They differ, so that no round hits another's prefix cache entries. The
        fastest round counts."""
        return range(1000 + self.batch, 1002 + self.batch)

    @property
    def tokens(self) -> int:
        """Output tokens of all requests."""
        return self.batch * self.output_tokens

    def result(self, system: str, shape: str, seconds: float) -> Throughput:
        return Throughput(system, shape, *self, self.tokens / seconds)


def tiny() -> Shape:
    return replace(Shape.read(TINY), name="tiny")


def tiny_sparse() -> Shape:
    experts = {"moe_intermediate_size": 64, "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True}
    family = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    return Shape("tiny, sparse", dict(tiny().config) | family | experts)


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
SPARSE = Shape(
    "Qwen3-30B-A3B, 12 layers",
    dict(SMALL.config)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "num_hidden_layers": 12,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
)
"""A quarter of the model's layers, which are all alike: they load quickly, and fit most GPUs."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "AWQ": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "FP8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
"""Quantization of matrices, as in config.json."""


def quantized(shape: Shape) -> list[Shape]:
    """The same shape with each of METHODS."""
    return [
        Shape(f"{shape.name}, {name}", dict(shape.config) | {"quantization_config": dict(config)})
        for name, config in METHODS.items()
    ]
