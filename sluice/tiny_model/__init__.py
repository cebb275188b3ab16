"""A 5-million-parameter Qwen3 checkpoint that completes Python, for tests, demos and first runs."""

from pathlib import Path


def path() -> Path:
    """The checkpoint's folder, in the layout of `from_pretrained`."""
    return Path(__file__).parent / "checkpoint"
