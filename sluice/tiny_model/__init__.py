"""A 5-million-parameter Qwen3 checkpoint that completes Python, for tests, demos and first runs."""

from pathlib import Path


def path() -> Path:
    """Folder of the checkpoint, in the layout `from_pretrained` reads."""
    return Path(__file__).parent / "checkpoint"
