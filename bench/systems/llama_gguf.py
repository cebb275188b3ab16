"""Converts a checkpoint of Qwen3 to a GGUF file.

The file for the peer has no vocabulary, because its requests are token ids. python -m bench.systems.llama_gguf
CHECKPOINT FILE PRECISION, in an environment with gguf, writes a file with a vocabulary, for llama.cpp's server.
"""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

MODEL = "model.gguf"
CONFIG = "config.json"
TYPES = {"int8": "Q8_0", "float32": "F32"}
"""Types of matrices. Vectors, the weights of norms, stay float32."""
OF_MODEL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
OF_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def convert(source: Path, folder: Path, precision: str) -> None:
    config = _write(source, folder / MODEL, precision, with_tokenizer=False)
    (folder / CONFIG).write_text(json.dumps(config | {"precision": precision}), encoding="utf-8")


def _write(source: Path, file: Path, precision: str, *, with_tokenizer: bool) -> dict[str, Any]:
    """Returns the checkpoint's config.json."""
    gguf: Any = import_module("gguf")
    config: dict[str, Any] = json.loads((source / CONFIG).read_text(encoding="utf-8"))
    writer = gguf.GGUFWriter(file, config["model_type"])
    _write_shape(writer, config)
    if with_tokenizer:
        _write_tokenizer(gguf, writer, source, config)
    else:
        writer.add_tokenizer_model("no_vocab")
    _write_weights(gguf, writer, source, gguf.GGMLQuantizationType[TYPES[precision]])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(
        config["rope_theta"] if "rope_theta" in config else config["rope_parameters"]["rope_theta"]
    )
    writer.add_vocab_size(config["vocab_size"])


def _write_tokenizer(gguf: Any, writer: Any, source: Path, config: dict[str, Any]) -> None:
    """Writes a byte-level BPE tokenizer that splits texts like Qwen's, as the bundled model's does."""
    found = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    known = {number: text for text, number in found["model"]["vocab"].items()}
    special = {token["id"]: token["content"] for token in found["added_tokens"]}
    kinds, tokens, types = gguf.TokenType, [], []
    for number in range(config["vocab_size"]):
        tokens.append(special.get(number) or known.get(number) or f"[unused {number}]")
        types.append(kinds.CONTROL if number in special else kinds.NORMAL if number in known else kinds.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in found["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    template = source / "chat_template.jinja"
    if template.is_file():
        writer.add_chat_template(template.read_text(encoding="utf-8"))


def _write_weights(gguf: Any, writer: Any, source: Path, matrices: Any) -> None:
    for name, weight in read_weights(source / "model.safetensors"):
        kind = matrices if weight.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quantize(weight, kind), raw_dtype=kind)


def read_weights(file: Path) -> Iterator[tuple[str, Any]]:
    """Names and float32 arrays. Does not use safetensors, because NumPy does not support bfloat16."""
    numpy: Any = import_module("numpy")
    data = numpy.memmap(file, "uint8", "r")
    start = 8 + int(data[:8].view("uint64")[0])
    for name, about in json.loads(bytes(data[8:start])).items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        raw = data[start + begin : start + end]
        weight = raw.view("uint16").astype("uint32") << 16 if about["dtype"] == "BF16" else raw.view("uint32")
        yield name, weight.view("float32").reshape(about["shape"])


def gguf_name(name: str) -> str:
    """Raises KeyError for a weight that Qwen3 does not have."""
    own = name.removesuffix(".weight")
    if own in OF_MODEL:
        return f"{OF_MODEL[own]}.weight"
    layer, _, rest = own.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{OF_LAYER[rest]}.weight"


def main() -> None:
    source, file, precision = sys.argv[1:]
    _write(Path(source), Path(file), precision, with_tokenizer=True)


if __name__ == "__main__":
    main()
