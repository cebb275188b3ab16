"""What a peer is told."""

from typing import NamedTuple


class Options(NamedTuple):
    """Where the model is, and how large the work will be."""

    model: str
    """Folder without weights."""
    device: str
    batch: int
    """The largest."""
    tokens: int
    """Of a sequence, at most."""

    @property
    def dtype(self) -> str:
        """As everywhere in the run."""
        return "bfloat16" if self.device == "cuda" else "float32"
