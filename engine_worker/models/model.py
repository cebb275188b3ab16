"""What the runner sees of a model."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend, HeadShape
from engine_worker.attention.cache import KVCache
from engine_worker.attention.inputs import AttentionInputs
from engine_worker.layers.shard import ALONE, Cut, Shard
from engine_worker.models.windows import Windows


class ModelConfig(Protocol):
    """What of a model's configuration others need."""

    @property
    def vocab_size(self) -> int:
        """Tokens."""

    @property
    def hidden_size(self) -> int:
        """Numbers per token between layers."""

    @property
    def windows(self) -> Windows:
        """One per layer."""

    @property
    def heads(self) -> HeadShape:
        """The same in all layers."""

    @property
    def num_layers(self) -> int:
        """Decoder layers."""


class Model(Protocol):
    """A decoder over the paged cache and its output head. Its weights come first, then `freeze`, then calls."""

    @property
    def config(self) -> ModelConfig:
        """What it was made by."""

    @property
    def graphs(self) -> bool:
        """Whether a call looks at no tensor's values on the host, so that a CUDA graph can hold it."""

    def __call__(self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs) -> Tensor:
        """token_ids [T] int64, positions [T] int64 -> hidden states [T, hidden], before the head."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] float32."""
        ...

    def targets(self) -> dict[str, Tensor]:
        """Where the weights go."""
        ...

    def cuts(self) -> Mapping[str, Cut]:
        """By name, which part of the checkpoint's tensor a target is, where it is not all of it."""
        ...

    def freeze(self) -> None:
        """The weights are final."""


@runtime_checkable
class SelfLoading(Protocol):
    """A model that knows how to read a checkpoint."""

    def load(self, folder: Path, progress: Callable[[int, int], None]) -> None:
        """In place of filling its targets. `progress` is called with bytes done and bytes in all. Raises
        CheckpointError."""


class Architecture(Protocol):
    """A class of models."""

    def __call__(
        self,
        config: Any,
        backend: AttentionBackend,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> Model:
        """`config`: as `read_config` gives it, or with narrower windows. Raises ValueError where the ranks cannot share
        the model."""
        ...

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> Any:
        """A ModelConfig from config.json. Raises CheckpointError."""
        ...
