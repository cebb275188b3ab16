"""The interface between the runner and models."""

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

from engine_worker.attention.backend import AttentionBackend, AttentionInputs, HeadShape
from engine_worker.attention.cache import KVCache
from engine_worker.layers.adapters import StepAdapters
from engine_worker.layers.shard import Cut, Place
from engine_worker.models.config import Windows
from sluice.checkpoint.folder import Checkpoint


class ModelConfig(Protocol):
    """The part of a model's configuration that the runner needs."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def hidden_size(self) -> int: ...

    @property
    def windows(self) -> Windows: ...

    @property
    def heads(self) -> HeadShape:
        """The same in all layers."""

    @property
    def num_layers(self) -> int: ...


class Embeds(NamedTuple):
    """Rows of prompt tables in place of the embeddings of tokens."""

    tokens: Tensor
    """[V] int64: indices, in the step, of the tokens that the rows belong to; these tokens' ids are placeholders."""
    rows: Tensor
    """[V, hidden] float32."""

    def replace_rows(self, x: Tensor) -> None:
        """Write the rows into the embeddings of a step's tokens, x [T, hidden]."""
        x.index_copy_(0, self.tokens, self.rows.to(x.dtype))


class Taps:
    """Copies the outputs of `layers`, which clients can request as tensors, for some of a step's tokens."""

    def __init__(self, layers: Collection[int], tokens: Tensor | None) -> None:
        """`tokens`: [K] int64, indices in the step; None: copy nothing."""
        self._layers = layers
        self._tokens = tokens
        self.rows: dict[int, Tensor] = {}
        """Output [K, hidden] by layer."""

    def add(self, layer: int, x: Tensor, update: Tensor) -> None:
        """Record a layer's output x + update, both [T, hidden]; see `DecoderLayer`."""
        if layer in self._layers and self._tokens is not None:
            self.rows[layer] = x.index_select(0, self._tokens) + update.index_select(0, self._tokens)


class Model(Protocol):
    """A decoder over the paged cache, and its output head. Load its weights, call `freeze`, then compute steps."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def graphs(self) -> bool:
        """Whether a call never reads a tensor's values on the host, so that a CUDA graph can capture it. Known after
        `freeze`."""

    @property
    def takes_embeds(self) -> bool:
        """Whether a call accepts `embeds`: rows of prompt tables in place of embeddings. Known after `freeze`."""

    @property
    def has_taps(self) -> bool:
        """Whether a call accepts `taps`: copies of single layers' outputs."""

    @property
    def has_axes(self) -> bool:
        """Whether a token has three rotary positions (M-RoPE); see `engine_worker.positions`."""

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        cache: KVCache,
        inputs: AttentionInputs,
        adapters: StepAdapters | None = None,
        embeds: Embeds | None = None,
        taps: Taps | None = None,
    ) -> Tensor:
        """token_ids [T] int64, positions [T] int64, or [3, T] if `has_axes` -> hidden states [T, hidden], before the
        head. `adapters`: only if the model has targets for them (`find_targets`). `embeds`, `taps`: only if
        `takes_embeds`, `has_taps`."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] float32; undefined on ranks other than 0."""

    def targets(self) -> dict[str, Tensor]:
        """Views to load the weights into, by the checkpoint's tensor names."""

    def cuts(self) -> Mapping[str, Cut]:
        """The slice of the checkpoint's tensor that each target contains; targets not listed contain all of it."""

    def freeze(self) -> None:
        """Call when the weights are final. Raises CheckpointError if the model cannot be served."""


@runtime_checkable
class SelfLoading(Protocol):
    """A model that reads a checkpoint by itself, instead of having its targets filled."""

    def load(self, checkpoint: Checkpoint, progress: Callable[[int, int], None]) -> None:
        """`progress` is called with the bytes loaded and the bytes in total. Raises CheckpointError."""


class Architecture(Protocol):
    """A model class."""

    def __call__(self, config: Any, backend: AttentionBackend, place: Place) -> Model:
        """`config`: from `read_config`, possibly with narrower windows. Raises ValueError if the model cannot be split
        over the ranks."""

    @staticmethod
    def read_config(raw: Mapping[str, Any]) -> Any:
        """A ModelConfig from config.json. Raises CheckpointError, or NotNativeError if another implementation may
        support the checkpoint."""
