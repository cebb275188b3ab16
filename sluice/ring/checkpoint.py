"""A model folder in Hugging Face layout: what services read of it besides weights, and fingerprints of it."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec

from sluice.ring.other_formats import why_incomplete, why_no_folder, why_no_weights, why_not_downloaded
from sluice.ring.vision import Vision, VisionError, split_config

FILES = ["*.json", "*.jinja"]
WEIGHTS = ["*.safetensors"]
CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""Names that architectures give to the longest context that their positions allow."""
DEFAULT_CONTEXT = 2048
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    *TOKENIZER_FILES,
    "model.safetensors.index.json",
)
"""Files that affect tokens besides the weights: prompts, sampling defaults and shapes."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
"""More of these, of models that see."""
# Of a weight file, distributed over its tensors: at least one each, in the tensor's middle.
SAMPLES, SAMPLE_BYTES = 512, 1024
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors."""
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LISTED = 5
LENGTH_BYTES = 8
"""A file begins with the length of its header."""
GIT_LFS = b"version https://git-lfs"


class CheckpointError(ValueError):
    """The folder is not a usable checkpoint; the message names the file."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Everything but the tensors."""

    path: Path
    name: str
    """Served name, which clients put into `model`."""
    config: dict[str, Any]
    """config.json; of a vision-language model, that of its decoder."""
    generation: dict[str, Any]
    """generation_config.json; {} without that file."""
    tokenizer_config: dict[str, Any]
    chat_template: str | None
    fingerprint: str
    """See `model_fingerprint`."""
    vision: Vision | None = None
    """None: its prompts have no images."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Hex digest of the tokenizer files: equal in all services whose texts must agree."""
        return _digest(self.path, TOKENIZER_FILES).hexdigest()

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, at least the tokenizer's size."""
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
        return self.path / "tokenizer.json"


def open_checkpoint(
    model: str, name: str | None = None, *, revision: str | None = None, weights: bool = True
) -> Checkpoint:
    """Open a local folder, or a hub id such as "Qwen/Qwen3-0.6B" (downloaded once, through huggingface_hub).

    revision: branch, tag or commit of a hub id.
    weights: a download brings the tensors too.
    Raises CheckpointError if a file is missing or not JSON, and for a revision of a local folder.
    """
    path = _local_folder(model, revision, [*FILES, *WEIGHTS] if weights else FILES)
    for name_of_file in ("config.json", "tokenizer.json"):
        if not (path / name_of_file).is_file():
            raise CheckpointError(why_incomplete(path, name_of_file))
    try:
        config, vision = split_config(_read_json(path / "config.json"), _image_processor(path))
    except VisionError as error:
        raise CheckpointError(f"{path / 'config.json'}: {error}") from error
    if not isinstance(config.get("vocab_size"), int):
        raise CheckpointError(f"{path / 'config.json'} has no vocab_size")
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    return Checkpoint(
        path=path,
        name=name or (path.name if Path(model).exists() else model),
        config=config,
        generation=_read_json(path / "generation_config.json"),
        tokenizer_config=tokenizer_config,
        chat_template=_chat_template(path, tokenizer_config),
        fingerprint=model_fingerprint(path),
        vision=vision,
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


def _read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def _image_processor(path: Path) -> dict[str, Any]:
    """The image processor's settings, from the files that transformers reads; {} if the checkpoint has none of them."""
    found = _read_json(path / "processor_config.json").get("image_processor")
    return found if isinstance(found, dict) else _read_json(path / "preprocessor_config.json")


def _chat_template(path: Path, tokenizer_config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    # The second is of processors, which models that see have.
    found = _read_json(path / "chat_template.json").get("chat_template", tokenizer_config.get("chat_template"))
    if isinstance(found, list):
        found = {entry["name"]: entry["template"] for entry in found}.get("default")
    return found


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] | None = None
    """Relative to the end of the header; None for the metadata entry."""


def model_fingerprint(folder: Path) -> str:
    """Hex digest of the configuration, the tokenizer, and samples of every tensor: independent of paths and dates."""
    # Others have the fingerprint that they had before there were models that see.
    present = (name for name in PROCESSOR_FILES if (folder / name).is_file())
    digest = _digest(folder, (*MODEL_FILES, *present))
    for file in sorted(folder.glob("*.safetensors")):
        _digest_weights(digest, file)
    return digest.hexdigest()


def _digest(folder: Path, names: tuple[str, ...]) -> blake2b:
    digest = blake2b(digest_size=8)
    for name in names:
        file = folder / name
        # A missing file counts as an empty one.
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return digest


def _digest_weights(digest: blake2b, file: Path) -> None:
    # Samples of every tensor, because fine-tuned models may differ in a few only. Reading all would take minutes.
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    with file.open("rb", buffering=0) as opened:
        prefix = opened.read(LENGTH_BYTES)
        header = opened.read(min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES))
        digest.update(prefix + header)
        tensors = _tensors(header, len(prefix) + len(header), size)
        each = max(1, SAMPLES // len(tensors))
        for begin, end in tensors:
            for at in _spread(begin, end, each):
                opened.seek(at)
                digest.update(opened.read(min(SAMPLE_BYTES, end - at)))


def _tensors(header: bytes, start: int, size: int) -> list[tuple[int, int]]:
    """Begin and end of each tensor in the file; of the whole file if the header is malformed, which loading reports."""
    try:
        found = [(start + begin, start + end) for begin, end in _data_offsets(header)]
    except ValueError:
        return [(0, size)]
    return found if found and all(start <= begin <= end <= size for begin, end in found) else [(0, size)]


def _data_offsets(header: bytes) -> list[tuple[int, int]]:
    """Of each tensor. Raises ValueError if the header is malformed."""
    entries = msgspec.json.decode(header, type=dict[str, _Tensor]).values()
    return [entry.data_offsets for entry in entries if entry.data_offsets is not None]


def _spread(begin: int, end: int, count: int) -> list[int]:
    last = max(begin, end - SAMPLE_BYTES)
    if count == 1:
        return [(begin + last) // 2]
    return [begin + (last - begin) * i // (count - 1) for i in range(count)]


def weight_files(folder: Path) -> list[Path]:
    """The files of the folder's index, or the single file. Raises CheckpointError if some are missing."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise CheckpointError(why_no_weights(folder))
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is not an index of weights: {error!r}") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} has {len(files) - len(missing)} of the {len(files)} weight files of its index; "
            f"missing: {listed(missing)}. Download them again"
        )
    return files


def check_weight_files(folder: Path) -> None:
    """Read the header of each file only. Raises CheckpointError for a missing or truncated file."""
    for file in weight_files(folder):
        _check_file(file)


def _check_file(file: Path) -> None:
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(len(GIT_LFS))
        if start == GIT_LFS:
            raise CheckpointError(f"{file} is a pointer of Git LFS and not the weights: run `git lfs pull` there")
        length = int.from_bytes(start[:LENGTH_BYTES], "little")
        whole = LENGTH_BYTES + length
        if len(start) < LENGTH_BYTES or whole > size:
            raise CheckpointError(f"{file} ends within its header, after {size} bytes: download it again")
        opened.seek(LENGTH_BYTES)
        whole += _data_bytes(file, opened.read(length))
    if size != whole:
        raise CheckpointError(f"{file} has {size} bytes, by its header {whole}: download it again")


def _data_bytes(file: Path, header: bytes) -> int:
    try:
        return max((end for _, end in _data_offsets(header)), default=0)
    except ValueError as error:
        raise CheckpointError(f"{file} has no safetensors header: download it again") from error


def listed(names: Iterable[str]) -> str:
    """The first LISTED names, and how many more there are."""
    ordered = sorted(names)
    more = f" and {len(ordered) - LISTED} more" if len(ordered) > LISTED else ""
    return ", ".join(ordered[:LISTED]) + more
