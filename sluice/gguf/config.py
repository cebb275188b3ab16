"""config.json and generation_config.json from a GGUF file's metadata.

Metadata: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md#standardized-key-value-pairs
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import unpack
from typing import Any, NamedTuple

from sluice.checkpoint.gguf import Gguf, GgufError, GgufTensor


class Family(NamedTuple):
    model_type: str
    architecture: str
    fixed: Mapping[str, Any] = {}
    """Options that llama.cpp's code has, and not the file."""


FAMILIES = {
    "llama": Family("llama", "LlamaForCausalLM"),
    "qwen2": Family("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
}
"""By `general.architecture`."""
NUMBERS = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
"""Metadata of an architecture, and the names in config.json."""
READ_ELSEWHERE = (
    "attention.value_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "tensor_data_layout",
    "vocab_size",
)
REQUIRED = ("block_count", "context_length", "embedding_length", "attention.head_count")
DEFAULT_THETA = 10_000.0
EMBEDDING, HEAD, QUERY_BIAS, OUTPUT_BIAS, ROPE_FACTORS = (
    "token_embd.weight", "output.weight", "blk.0.attn_q.bias", "blk.0.attn_output.bias", "rope_freqs.weight",
)  # fmt: skip
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of all Llama 3 models; the file has only the factors that follow from them."""
CLOSE = 1e-3
SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
"""Metadata `general.sampling.…`, and the names in generation_config.json."""
ENDS = ("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>")
"""Tokens that end a turn, for files that do not say which one does."""
CONTROL = 3
"""Type of a token that is no text."""


def config_of(file: Path, gguf: Gguf) -> dict[str, Any]:
    """config.json. Raises GgufError if the model is not supported."""
    name = gguf.fields.get("general.architecture")
    if name not in FAMILIES:
        raise GgufError(f"has the architecture {name!r}, which is not supported; supported: {', '.join(FAMILIES)}")
    family, own = FAMILIES[name], _own_fields(gguf, name)
    if name == "llama" and own.get("expert_count"):
        raise GgufError("has the architecture llama with experts (Mixtral), which is not supported")
    tensors = {tensor.name: tensor for tensor in gguf.tensors}
    if EMBEDDING not in tensors:
        raise GgufError(f"has no {EMBEDDING}")
    numbers = {ours: own[theirs] for theirs, ours in NUMBERS.items() if theirs in own}
    heads = numbers["num_attention_heads"]
    numbers.setdefault("num_key_value_heads", heads)
    head_dim = numbers.setdefault("head_dim", numbers["hidden_size"] // heads)
    for field in ("attention.value_length", "rope.dimension_count"):
        if own.get(field, head_dim) != head_dim:
            raise GgufError(f"has {name}.{field} = {own[field]}, supported is only the size of a head, {head_dim}")
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in tensors,
        "attention_bias": QUERY_BIAS in tensors,
        "rope_parameters": _rope(file, own, head_dim, tensors.get(ROPE_FACTORS)),
        **{key: gguf.fields.get(f"tokenizer.ggml.{key}") for key in ("bos_token_id", "eos_token_id")},
        **family.fixed,
        **numbers,
    }


def _own_fields(gguf: Gguf, architecture: str) -> dict[str, Any]:
    """The metadata of the architecture, without its prefix. An option that is not known may change the model's
    results."""
    prefix = f"{architecture}."
    own = {name.removeprefix(prefix): value for name, value in gguf.fields.items() if name.startswith(prefix)}
    if unknown := sorted(own.keys() - NUMBERS.keys() - {*READ_ELSEWHERE}):
        raise GgufError(f"has the option {prefix}{unknown[0]}, which is not supported")
    if missing := [name for name in REQUIRED if name not in own]:
        raise GgufError(f"has no {prefix}{missing[0]}")
    for name, value in own.items():
        number = isinstance(value, int | float) and math.isfinite(value)
        if name in NUMBERS and (not number or value <= 0) and (name, value) != ("expert_count", 0):
            raise GgufError(f"has {prefix}{name} = {value!r:.80}, must be a positive number")
    return own


def _rope(file: Path, own: Mapping[str, Any], head_dim: int, factors: GgufTensor | None) -> dict[str, Any]:
    theta = float(own.get("rope.freq_base", DEFAULT_THETA))
    kind = own.get("rope.scaling.type", "linear" if "rope.scale_linear" in own else "none")
    factor = own.get("rope.scaling.factor", own.get("rope.scale_linear", 1.0))
    if factors is not None:
        return {"rope_theta": theta, "rope_type": "llama3", **_llama3(file, theta, head_dim, factors)}
    if kind == "none" or factor in (0.0, 1.0):
        return {"rope_theta": theta, "rope_type": "default"}
    if kind == "linear":
        return {"rope_theta": theta, "rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = own.get("rope.scaling.original_context_length", own["context_length"])
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        attention = own.get("rope.scaling.attn_factor")
        return {"rope_theta": theta, **scaling, **({} if attention is None else {"attention_factor": attention})}
    raise GgufError(f"has rope.scaling.type {kind!r}, supported: none, linear, yarn")


def _llama3(file: Path, theta: float, head_dim: int, tensor: GgufTensor) -> dict[str, float]:
    """llama.cpp stores what each frequency is divided by; which options lead to these factors is not in the file."""
    count = head_dim // 2
    if (tensor.type, tensor.shape) != ("F32", (count,)):
        raise GgufError(f"has a {ROPE_FACTORS} of type {tensor.type} and shape {list(tensor.shape)}")
    with file.open("rb") as opened:
        opened.seek(tensor.start)
        factors = unpack(f"<{count}f", opened.read(4 * count))
    options = {"factor": max(factors), **LLAMA3}
    expected = [_divisor(theta ** (-2 * i / head_dim), **options) for i in range(count)]
    if not all(math.isclose(one, other, rel_tol=CLOSE) for one, other in zip(factors, expected, strict=True)):
        raise GgufError(f"has a {ROPE_FACTORS} that is not that of a Llama 3 model")
    return options


def _divisor(
    frequency: float,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_max_position_embeddings: float,
) -> float:
    waves = original_max_position_embeddings * frequency / (2 * math.pi)
    unscaled = min(1.0, max(0.0, (waves - low_freq_factor) / (high_freq_factor - low_freq_factor)))
    return 1 / ((1 - unscaled) / factor + unscaled)


def generation_of(gguf: Gguf) -> dict[str, Any]:
    """generation_config.json: the tokens that end an answer, and sampling settings if the file has some."""
    names = {f"general.sampling.{theirs}": ours for theirs, ours in SAMPLING.items()}
    sampling = {ours: gguf.fields[theirs] for theirs, ours in names.items() if theirs in gguf.fields}
    start = gguf.fields.get("tokenizer.ggml.bos_token_id")
    return {
        **({} if start is None else {"bos_token_id": start}),
        "eos_token_id": list(dict.fromkeys(_ends(gguf.fields))),
        **({"do_sample": True} if sampling else {}),
        **sampling,
    }


def _ends(fields: Mapping[str, Any]) -> Iterator[int]:
    named = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    yield from (token for token in named.values() if token is not None)
    if named["eot"] is None:
        tokens, types = (fields.get(f"tokenizer.ggml.{name}", ()) for name in ("tokens", "token_type"))
        pairs = enumerate(zip(tokens, types, strict=False))
        yield from (token for token, (text, kind) in pairs if kind == CONTROL and text in ENDS)
