"""A model folder in Hugging Face layout: what services read from it besides weights, and a fingerprint to agree by."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.ring.fingerprint import model_fingerprint, tokenizer_fingerprint
from sluice.ring.other_formats import why_incomplete, why_no_folder, why_not_downloaded

FILES = ["*.json", "*.jinja"]
WEIGHTS = ["*.safetensors"]
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What architectures call the longest context that their positions allow."""
DEFAULT_CONTEXT = 2048


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
    """See `sluice.ring.fingerprint.model_fingerprint`."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """See `sluice.ring.fingerprint.tokenizer_fingerprint`."""
        return tokenizer_fingerprint(self.path)

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


def open_checkpoint(
    model: str, name: str | None = None, *, revision: str | None = None, weights: bool = True
) -> Checkpoint:
    """Open a local folder, or a hub id such as "Qwen/Qwen3-0.6B" (downloaded once, through huggingface_hub).

    revision: branch, tag or commit of a hub id.
    weights: a download brings the tensors too.
    Raises CheckpointError where a file is missing or is no JSON, and for a revision of a local folder.
    """
    path = _local_folder(model, revision, [*FILES, *WEIGHTS] if weights else FILES)
    for name_of_file in ("config.json", "tokenizer.json"):
        if not (path / name_of_file).is_file():
            raise CheckpointError(why_incomplete(path, name_of_file))
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
        fingerprint=model_fingerprint(path),
    )


def _local_folder(model: str, revision: str | None, files: list[str]) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(f"revision {revision!r} is for models of the hub, and {model!r} is a local folder")
        return path
    if (problem := why_no_folder(model, path)) is not None:
        raise CheckpointError(problem)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(why_not_downloaded(model, revision, error)) from error


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
