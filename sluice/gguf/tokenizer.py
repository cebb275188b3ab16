"""The tokenizer of a GGUF file, by transformers' converter: python -m sluice.gguf.tokenizer FOLDER < metadata

A process of its own, since the converter imports much that the program which needs the folder does not. That program
has parsed the file: its metadata arrives as MessagePack.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from sluice.checkpoint.gguf import GgufError

PREFIX, ARCHITECTURE = "tokenizer.ggml.", "general.architecture"
"""Names of the metadata that is used."""
CONVERTERS = {
    "tokenizer_type": "model",
    "pre_tokenizer_type": "pre",
    "tokens": "tokens",
    "scores": "scores",
    "token_type": "token_type",
    "merges": "merges",
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unk_token_id": "unknown_token_id",
    "pad_token_id": "padding_token_id",
    "add_prefix_space": "add_space_prefix",
}
"""The converter's names, and those of the metadata `tokenizer.ggml.…`."""
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
MODELS = ("gpt2", "llama")
"""Byte-level BPE, and SentencePiece's BPE."""
LLAMA3 = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
"""Pre-tokenizers like that of Llama 3, whose words need no merges, and whose texts begin with the BOS token."""
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""Pre-tokenizers that split numbers into digits, and otherwise do what GPT-2's does."""
LIKE_GPT2 = (None, "default", "gpt-2", "gpt2", "phi-2", "olmo", "dbrx", "jais")


def write_tokenizer(metadata: Mapping[str, Any], folder: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json. Raises GgufError."""
    fields = {name.removeprefix(PREFIX): value for name, value in metadata.items() if name.startswith(PREFIX)}
    model, splits = fields.get("model"), fields.get("pre")
    if model not in MODELS:
        raise GgufError(f"has a tokenizer of the kind {model!r}, supported: {', '.join(MODELS)}")
    if not isinstance(fields.get("tokens"), list):
        raise GgufError("has no vocabulary (tokenizer.ggml.tokens)")
    backend = _converted(str(metadata.get(ARCHITECTURE)), fields)
    if model == "gpt2" and splits in LLAMA3:
        backend.model.ignore_merges = True
    if splits in DIGITS:
        from tokenizers import pre_tokenizers

        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    special = {name: _token(fields, kind) for name, kind in SPECIAL.items()}
    adds = {
        "add_bos_token": bool(fields.get("add_bos_token", model == "llama" or splits in LLAMA3)),
        "add_eos_token": bool(fields.get("add_eos_token", False)),
    }
    _add_ends(backend, special, **adds)
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **adds,
        **{name: token for name, token in special.items() if token is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _converted(architecture: str, fields: Mapping[str, Any]) -> Any:
    """A tokenizers.Tokenizer."""
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import (
            GGUF_PRE_TOKENIZER_SPLITS,
            convert_gguf_tokenizer,
        )
    except ImportError as error:
        raise GgufError(
            f"has a tokenizer that only transformers 5.23 and later can convert ({error}): "
            "pip install --upgrade transformers"
        ) from error
    splits = fields.get("pre")
    known = fields["model"] != "gpt2" or splits in (*GGUF_PRE_TOKENIZER_SPLITS, *LLAMA3, *DIGITS, *LIKE_GPT2)
    if not known:
        raise GgufError(f"has the pre-tokenizer {splits!r} (tokenizer.ggml.pre), which is not supported")
    given = {ours: fields[theirs] for ours, theirs in CONVERTERS.items() if theirs in fields}
    backend, _ = convert_gguf_tokenizer(architecture, given)
    return backend


def _token(fields: Mapping[str, Any], kind: str) -> str | None:
    number, tokens = fields.get(f"{kind}_token_id"), fields["tokens"]
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _add_ends(backend: Any, special: Mapping[str, str | None], *, add_bos_token: bool, add_eos_token: bool) -> None:
    """Let the tokenizer add the first and the last token of a text."""
    from tokenizers import processors

    first = special["bos_token"] if add_bos_token else None
    last = special["eos_token"] if add_eos_token else None
    if first is None and last is None:
        return
    single = " ".join(filter(None, (first and f"{first}:0", "$A:0", last and f"{last}:0")))
    pair = " ".join(filter(None, (single, first and f"{first}:1", "$B:1", last and f"{last}:1")))
    tokens = [(token, backend.token_to_id(token)) for token in dict.fromkeys((first, last)) if token is not None]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=tokens)


if __name__ == "__main__":
    try:
        write_tokenizer(msgspec.msgpack.decode(sys.stdin.buffer.read()), Path(sys.argv[1]))
    except GgufError as error:
        sys.exit(str(error))
