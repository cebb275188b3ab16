"""A model folder in Hugging Face layout: what services read from it besides weights, and a fingerprint to agree by."""

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

FILES = ["*.json", "*.jinja"]
WEIGHTS = ["*.safetensors"]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What architectures call the longest context that their positions allow."""
DEFAULT_CONTEXT = 2048
SAMPLES, SAMPLE_BYTES = 33, 1024
"""Of a file of weights: the first, the middle and the last of its bytes, and some between them."""
MAX_HEADER_BYTES = 100_000_000
"""That safetensors allows."""


class CheckpointError(ValueError):
    """The folder is no usable checkpoint; the message names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything but the tensors."""

    path: Path
    name: str
    """Served name: what clients put into `model`."""
    config: dict[str, Any]
    """config.json."""
    generation: dict[str, Any]
    """generation_config.json; empty where there is none."""
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    fingerprint: str
    """Hex; of the tokenizer and config files and of what `_digest_weights` reads of the weights."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hex; of the tokenizer files only: services whose texts must agree have it in common."""
        return _digest(self.path, TOKENIZER_FILES).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; at least the tokenizer's size."""
        return int(self.config["vocab_size"])

    @property
    def max_context_tokens(self) -> int:
        """Longest prompt plus output that the model's positions allow."""
        found = (self.config.get(name) for name in CONTEXT)
        return int(next((tokens for tokens in found if tokens is not None), DEFAULT_CONTEXT))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Of generation_config.json, else of config.json."""
        found = self.generation.get("eos_token_id")
        if found is None:
            found = self.config.get("eos_token_id")
        if found is None:
            return ()
        return tuple(found) if isinstance(found, list) else (int(found),)

    @property
    def tokenizer_file(self) -> Path:
        """tokenizer.json."""
        return self.path / "tokenizer.json"


def open_checkpoint(model: str, name: str | None = None, *, weights: bool = True) -> Checkpoint:
    """Open a local folder, or a hub id such as "Qwen/Qwen3-0.6B" (downloaded once, through huggingface_hub).

    weights: a download brings the tensors too.
    Raises CheckpointError where a file is missing or is no JSON.
    """
    path = _local_folder(model, [*FILES, *WEIGHTS] if weights else FILES)
    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path} has no tokenizer.json")
    config = _read_json(path / "config.json", required=True)
    if not isinstance(config.get("vocab_size"), int):
        raise CheckpointError(f"{path / 'config.json'} has no vocab_size")
    tokenizer_config = _read_json(path / "tokenizer_config.json", required=False)
    return Checkpoint(
        path=path,
        name=name or (path.name if Path(model).exists() else model),
        config=config,
        generation=_read_json(path / "generation_config.json", required=False),
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(path, tokenizer_config),
        fingerprint=_fingerprint(path),
    )


def _local_folder(model: str, files: list[str]) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith(".") or model.count("/") != 1:
        raise CheckpointError(f"{model!r} is neither a folder nor a hub id such as Qwen/Qwen3-0.6B")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=files))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        raise CheckpointError(f"{model!r} is no folder here and could not be downloaded: {error}") from error


def _read_json(path: Path, required: bool) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise CheckpointError(f"{path.parent} has no {path.name}")
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return found


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    found = tokenizer_config.get("chat_template")
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


def _digest(path: Path, names: tuple[str, ...]) -> blake2b:
    digest = blake2b(digest_size=8)
    for name in names:
        file = path / name
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return digest


def _fingerprint(path: Path) -> str:
    digest = _digest(path, ("config.json", *TOKENIZER_FILES))
    for file in sorted(path.glob("*.safetensors")):
        _digest_weights(digest, file)
    return digest.hexdigest()


def _digest_weights(digest: blake2b, file: Path) -> None:
    """Name, size and header, and some of the bytes: from all over the file, for models that were made of the same one
    differ in some tensors and are equal in others. All of them would take minutes."""
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    last = max(0, size - SAMPLE_BYTES)
    with file.open("rb") as opened:
        header = int.from_bytes(opened.read(8), "little")
        digest.update(opened.read(min(header, MAX_HEADER_BYTES)))
        for i in range(SAMPLES):
            opened.seek(last * i // (SAMPLES - 1))
            digest.update(opened.read(SAMPLE_BYTES))
