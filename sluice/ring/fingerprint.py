"""Digests of the files in a model folder: equal for two copies of a checkpoint, whatever their paths and dates."""

from hashlib import blake2b
from pathlib import Path

import msgspec

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_FILES = (
    "config.json",
    "generation_config.json",
    "chat_template.jinja",
    *TOKENIZER_FILES,
    "model.safetensors.index.json",
)
"""What decides on tokens beside the weights: prompts, sampling defaults and shapes."""
SAMPLES, SAMPLE_BYTES = 512, 1024
"""Of a file of weights, shared out over its tensors: at least one each, in its middle."""
MAX_HEADER_BYTES = 100_000_000
"""That safetensors allows."""


class _Tensor(msgspec.Struct):
    data_offsets: tuple[int, int] | None = None
    """Bytes after the header; None: the file's metadata."""


def tokenizer_fingerprint(folder: Path) -> str:
    """Hex; of the tokenizer files only: services whose texts must agree have it in common."""
    return _digest(folder, TOKENIZER_FILES).hexdigest()


def model_fingerprint(folder: Path) -> str:
    """Hex; of the configuration, the tokenizer, and samples of every tensor."""
    digest = _digest(folder, MODEL_FILES)
    for file in sorted(folder.glob("*.safetensors")):
        _digest_weights(digest, file)
    return digest.hexdigest()


def _digest(folder: Path, names: tuple[str, ...]) -> blake2b:
    digest = blake2b(digest_size=8)
    for name in names:
        file = folder / name
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return digest


def _digest_weights(digest: blake2b, file: Path) -> None:
    """Name, size and header, and bytes of every tensor, because models that were trained from the same one may differ
    in a few tensors. To read all bytes would take minutes."""
    size = file.stat().st_size
    digest.update(f"{file.name}\0{size}\0".encode())
    with file.open("rb", buffering=0) as opened:
        prefix = opened.read(8)
        header = opened.read(min(int.from_bytes(prefix, "little"), MAX_HEADER_BYTES))
        digest.update(prefix + header)
        tensors = _tensors(header, len(prefix) + len(header), size)
        each = max(1, SAMPLES // len(tensors))
        for begin, end in tensors:
            for at in _spread(begin, end, each):
                opened.seek(at)
                digest.update(opened.read(min(SAMPLE_BYTES, end - at)))


def _tensors(header: bytes, start: int, size: int) -> list[tuple[int, int]]:
    """Where each one begins and ends in the file; the whole file where the header does not tell, which loading refuses
    with a better error than this could."""
    try:
        entries = msgspec.json.decode(header, type=dict[str, _Tensor]).values()
    except (msgspec.DecodeError, UnicodeDecodeError):
        return [(0, size)]
    found = [(start + each.data_offsets[0], start + each.data_offsets[1]) for each in entries if each.data_offsets]
    return found if found and all(start <= begin <= end <= size for begin, end in found) else [(0, size)]


def _spread(begin: int, end: int, count: int) -> list[int]:
    last = max(begin, end - SAMPLE_BYTES)
    if count == 1:
        return [(begin + last) // 2]
    return [begin + (last - begin) * i // (count - 1) for i in range(count)]
