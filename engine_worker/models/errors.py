"""Why a model is not served."""

from sluice.ring.checkpoint import CheckpointError


class NotComputedError(CheckpointError):
    """config.json asks for what the model's own class does not compute; another implementation might."""
