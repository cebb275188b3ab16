"""Token embedding and output head. Each rank holds some rows of the vocabulary."""

from torch import Tensor

from engine_worker.layers.layer import Layer
from engine_worker.layers.linear import Linear
from engine_worker.layers.shard import Cut, Place


class Embedding(Layer):
    """[T] int64 -> [T, hidden], a copy."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Place) -> None:
        self._shard = place.shard
        self._rows = place.shard.padded_span(vocab_size)
        self.weight = place.empty(self._rows.size, hidden_size)
        self.weight[self._rows.filled :].zero_()

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight[: self._rows.filled]}

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        return {f"{prefix}weight": Cut(0, self._rows)}

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._shard.size == 1:
            return self.weight.index_select(0, token_ids)
        # Every token is on exactly one rank; the others contribute zeros to the sum.
        rows = token_ids - self._rows.start
        elsewhere = (rows < 0) | (rows >= self._rows.size)
        found = self.weight.index_select(0, rows.masked_fill_(elsewhere, 0))
        return self._shard.all_reduce(found.masked_fill_(elsewhere.unsqueeze(1), 0))


class LMHead(Linear):
    """[R, hidden] -> logits [R, vocab] on rank 0; undefined on other ranks."""

    def __init__(self, hidden_size: int, vocab_size: int, place: Place) -> None:
        self._shard = place.shard
        self._rows = place.shard.padded_span(vocab_size)
        super().__init__(hidden_size, self._rows.size, place)
        self.weight[self._rows.filled :].zero_()

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        return {f"{prefix}weight": self.weight[: self._rows.filled]}

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        return {f"{prefix}weight": Cut(0, self._rows)}

    def __call__(self, x: Tensor) -> Tensor:
        # Only the last ranks have padding rows, so they end up behind the vocabulary.
        return self._shard.gather(super().__call__(x))[:, : self._rows.total]
