"""A model folder in Hugging Face layout: the files that all services read."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from sluice.checkpoint.config import context_of, eos_token_ids, tokenizer_eos, wrong_eos, wrong_size
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.fingerprint import model_fingerprint, tokenizer_fingerprint
from sluice.checkpoint.other_formats import why_incomplete, why_no_folder, why_not_downloaded
from sluice.checkpoint.quantization import Quantization, QuantizationError, read_quantization
from sluice.checkpoint.vision import Vision, VisionError, split_config

FILES = ["*.json", "*.jinja"]
WEIGHTS = ["*.safetensors"]
FLOAT = "__float__"
FLOATS = {text: float(text) for text in ("Infinity", "-Infinity", "NaN")}
TEMPLATE_FOLDER = "additional_chat_templates"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint without its tensors."""

    path: Path
    name: str
    """Name under which the model is served; clients put it into the field `model`."""
    config: dict[str, Any]
    """config.json. For a vision-language model, the configuration of its decoder."""
    generation: dict[str, Any]
    """generation_config.json. {} without that file."""
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    """For chats without tools and, unless there is a `tool_use_template`, for all others."""
    fingerprint: str
    """See `model_fingerprint`."""
    vision: Vision | None = None
    """None if the model does not accept images."""
    tool_use_template: str | None = None

    @property
    def has_chat(self) -> bool:
        return self.chat_template is not None or self.tool_use_template is not None

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hex digest of the tokenizer files. Must be equal in all services of a ring."""
        return tokenizer_fingerprint(self.path)

    @property
    def quantization(self) -> Quantization | None:
        """Raises CheckpointError if the weights are quantized in a way that is not supported."""
        try:
            return read_quantization(self.path, self.config)
        except QuantizationError as error:
            raise CheckpointError(f"{self.path}: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of rows of the embedding. The tokenizer may have fewer tokens, or, by mistake, more."""
        return int(self.config["vocab_size"])

    @property
    def max_context_tokens(self) -> int:
        """Maximum length of prompt plus output that the model's positions allow."""
        return context_of(self.config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All ids in generation_config.json and config.json, and the tokenizer's own. Raises CheckpointError."""
        ids = eos_token_ids(self.generation, self.config)
        try:
            own = tokenizer_eos(self.tokenizer_config, self.tokenizer_file)
        except (msgspec.DecodeError, RecursionError) as error:
            raise CheckpointError(f"{self.tokenizer_file} is not a tokenizer: {error}") from error
        if own is not None and own < self.vocab_size:
            ids.append(own)
        return tuple(dict.fromkeys(ids))

    @property
    def tokenizer_file(self) -> Path:
        return self.path / "tokenizer.json"


def open_checkpoint(
    model: str, name: str | None = None, *, revision: str | None = None, weights: bool = True
) -> Checkpoint:
    """Open a local folder, or a Hugging Face id such as "Qwen/Qwen3-0.6B", which is downloaded once.

    `revision`: branch, tag or commit of a Hugging Face model. `weights`: whether to download the tensors too; if not,
    `fetch_weights` does it later.
    Raises CheckpointError if a file is missing or not JSON, and if a revision is given for a local folder.
    """
    path = _local_folder(model, revision, [*FILES, *WEIGHTS] if weights else FILES)
    for file_name in ("config.json", "tokenizer.json"):
        if not (path / file_name).is_file():
            raise CheckpointError(why_incomplete(path, file_name))
    try:
        config, vision = split_config(_read_json(path / "config.json"), _image_processor(path))
    except VisionError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    generation = _read_json(path / "generation_config.json")
    _check_numbers(path, config, generation)
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    templates = _chat_templates(path, tokenizer_config)
    return Checkpoint(
        path=path,
        name=name or (path.name if Path(model).exists() else model),
        config=config,
        generation=generation,
        tokenizer_config=tokenizer_config,
        chat_template=templates.get("default"),
        tool_use_template=templates.get("tool_use"),
        fingerprint=model_fingerprint(path),
        vision=vision,
    )


def fetch_weights(checkpoint: Checkpoint, model: str) -> Checkpoint:
    """Download the weights of `model` if `open_checkpoint` has not, and return the checkpoint. Raises
    CheckpointError."""
    if Path(model).expanduser().is_dir():
        return checkpoint
    # The name of a snapshot's folder is its commit: a branch may have moved since.
    path = _local_folder(model, checkpoint.path.name, [*FILES, *WEIGHTS])
    return replace(checkpoint, path=path, fingerprint=model_fingerprint(path))


def _check_numbers(path: Path, config: dict[str, Any], generation: dict[str, Any]) -> None:
    """Raises CheckpointError."""
    if config.get("vocab_size") is None:
        raise CheckpointError(f"{path / 'config.json'} has no vocab_size")
    if (wrong := wrong_size(config) or wrong_eos(config)) is not None:
        raise CheckpointError(f"{path / 'config.json'}: {wrong}")
    if (wrong := wrong_eos(generation)) is not None:
        raise CheckpointError(f"{path / 'generation_config.json'}: {wrong}")


def _local_folder(model: str, revision: str | None, files: list[str]) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if revision is not None:
            raise CheckpointError(
                f"revision {revision!r} applies only to Hugging Face models, but {model!r} is a local folder"
            )
        return path
    if (problem := why_no_folder(model, path)) is not None:
        raise CheckpointError(problem)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(why_not_downloaded(model, revision, error)) from error


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. {} if the file does not exist. Raises CheckpointError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"), object_hook=_float)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def _float(value: dict[str, Any]) -> Any:
    """transformers writes Infinity as {"__float__": "Infinity"}; older versions and other programs write it plainly."""
    return FLOATS.get(str(value[FLOAT]), value) if value.keys() == {FLOAT} else value


def _image_processor(path: Path) -> dict[str, Any]:
    """Settings of the image processor, from the files that transformers reads. {} if neither file exists."""
    processor = _read_json(path / "processor_config.json").get("image_processor")
    return processor if isinstance(processor, dict) else _read_json(path / "preprocessor_config.json")


def _chat_templates(path: Path, tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """Templates by name, a single one as "default". As in transformers, the templates in separate files replace those
    in configurations. Raises CheckpointError."""
    files = [path / "chat_template.jinja", *sorted((path / TEMPLATE_FOLDER).glob("*.jinja"))]
    separate = {file.stem: _read_text(file) for file in files if file.is_file()}
    if "chat_template" in separate:
        separate["default"] = separate.pop("chat_template")
    if separate:
        return separate
    # The processors of vision-language models store their template in chat_template.json.
    templates = _read_json(path / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(templates, list):
        entries = [entry if isinstance(entry, dict) else {} for entry in templates]
        templates = {entry.get("name"): entry.get("template") for entry in entries}
    elif not isinstance(templates, dict):
        templates = {} if templates is None else {"default": templates}
    if not all(isinstance(text, str) for item in templates.items() for text in item):
        raise CheckpointError(f"{path}: chat_template must be a text or a list of objects with name and template")
    return templates


def _read_text(path: Path) -> str:
    """Raises CheckpointError."""
    try:
        return path.read_text(encoding="utf-8")
    except ValueError as error:
        raise CheckpointError(f"{path} is not a text in UTF-8: {error}") from error
