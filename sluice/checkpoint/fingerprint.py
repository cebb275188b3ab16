"""Digests of a checkpoint's files: services compare them, so that all serve the same model."""

from hashlib import blake2b
from pathlib import Path

from sluice.checkpoint.quantization import FILES as QUANTIZATION_FILES
from sluice.checkpoint.weight_files import GGUF, INDEX, layout_of

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
MODEL_FILES = ("config.json", "generation_config.json", "chat_template.jinja", *TOKENIZER_FILES, INDEX)
"""Files in addition to the weights that affect the output: through prompts, sampling defaults or shapes."""
PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "chat_template.json")
"""Further such files of vision-language models."""
TOOL_USE_FILE = "additional_chat_templates/tool_use.jinja"
SAMPLES, SAMPLE_BYTES = 512, 1024
"""Samples of a weight file that are hashed, distributed over its tensors, with at least one in each tensor's middle."""


def model_fingerprint(folder: Path) -> str:
    """Hex digest of the configuration, the tokenizer, and samples of every tensor. Independent of paths and dates."""
    # Absent files are skipped, so that the fingerprints of text-only models do not depend on these names.
    optional = (*PROCESSOR_FILES, TOOL_USE_FILE, *QUANTIZATION_FILES)
    present = (name for name in optional if (folder / name).is_file())
    digest = _digest(folder, (*MODEL_FILES, *present))
    for file in sorted((*folder.glob("*.safetensors"), *folder.glob(GGUF))):
        _add_weights(digest, file)
    return digest.hexdigest()


def tokenizer_fingerprint(folder: Path) -> str:
    """Hex digest of the tokenizer files."""
    return _digest(folder, TOKENIZER_FILES).hexdigest()


def file_fingerprint(file: Path) -> str:
    """Hex digest of the header of a weight file, and of samples of its tensors."""
    digest = blake2b(digest_size=8)
    _add_weights(digest, file)
    return digest.hexdigest()


def _digest(folder: Path, names: tuple[str, ...]) -> blake2b:
    digest = blake2b(digest_size=8)
    for name in names:
        file = folder / name
        # A missing file is treated as an empty one.
        digest.update(name.encode() + b"\0" + (file.read_bytes() if file.is_file() else b"") + b"\0")
    return digest


def _add_weights(digest: blake2b, file: Path) -> None:
    # Samples of every tensor, because fine-tuned models may differ in a few tensors only. Reading everything would take
    # minutes.
    header, tensors = layout_of(file)
    digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
    digest.update(header)
    samples_per_tensor = max(1, SAMPLES // len(tensors)) if tensors else 0
    with file.open("rb", buffering=0) as opened:
        for begin, end in tensors:
            for offset in _spread(begin, end, samples_per_tensor):
                opened.seek(offset)
                digest.update(opened.read(min(SAMPLE_BYTES, end - offset)))


def _spread(begin: int, end: int, count: int) -> list[int]:
    """Offsets of `count` samples, spread evenly over a range."""
    last = max(begin, end - SAMPLE_BYTES)
    if count == 1:
        return [(begin + last) // 2]
    return [begin + (last - begin) * i // (count - 1) for i in range(count)]
