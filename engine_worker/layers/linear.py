"""Linear layers (plain, fused and row-parallel), and token embedding and output head, split by rows of the
vocabulary."""

import torch.nn.functional as F
from torch import Tensor

from engine_worker.layers.layer import Layer, Matrices, Table
from engine_worker.layers.packing import Packer, Product
from engine_worker.layers.shard import Cut, Place, Span


class Linear(Layer):
    """y = x Wᵀ + b: [T, inputs] -> [T, outputs]."""

    def __init__(self, inputs: int, outputs: int, place: Place, *, bias: bool = False) -> None:
        self.weight = place.matrix(outputs, inputs)
        self.bias = place.empty(outputs) if bias else None
        self._product: Product | None = None

    def hold(self, matrices: Matrices, prefix: str = "") -> None:
        names = [name for name in self.targets(prefix) if name.endswith("weight")]
        self.keep(matrices.linear(names, len(self.weight), biased=self.bias is not None))

    def keep(self, form: Tensor | Product) -> None:
        """Compute with this weight, or product, from now on."""
        if isinstance(form, Tensor):
            self.weight = form
        else:
            # It replaces the plain weight: keeping both would take the memory of both.
            self._product = form
            del self.weight

    def pack(self, packer: Packer) -> None:
        if self._product is None and (product := packer.pack(self.weight)) is not None:
            self.keep(product)

    def __call__(self, x: Tensor) -> Tensor:
        if self._product is not None:
            return self._product(x, self.bias)
        if self._kernels is not None and self.bias is None and len(x) == 1:
            return self._kernels.product(x, self.weight)
        return F.linear(x, self.weight, self.bias)


class FusedLinear(Linear):
    """Several linear maps of the same input as one product; the result is this rank's shares of their outputs,
    concatenated. Checkpoints store the maps separately, as siblings of this layer: `targets` has a view for each."""

    def __init__(self, inputs: int, outputs: dict[str, Span], place: Place, *, bias: bool = False) -> None:
        super().__init__(inputs, sum(span.size for span in outputs.values()), place, bias=bias)
        self.inputs = Span(0, inputs, inputs)
        self.outputs = outputs
        """This rank's share of each map's outputs, by the map's name in the checkpoint."""

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        # "layers.0.self_attn.qkv_proj." -> "layers.0.self_attn".
        parent = prefix.removesuffix(".").rpartition(".")[0]
        targets: dict[str, Tensor] = {}
        for name, fused in super().targets().items():
            rows = fused.split([span.size for span in self.outputs.values()])
            targets |= {f"{parent}.{map_name}.{name}": view for map_name, view in zip(self.outputs, rows, strict=True)}
        return targets

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        parent = prefix.removesuffix(".").rpartition(".")[0]
        names = super().targets()
        return {
            f"{parent}.{map_name}.{name}": Cut(0, span) for map_name, span in self.outputs.items() for name in names
        }


class SummedLinear(Linear):
    """A row-parallel linear map: each rank has a share of the inputs, and the ranks' products are summed. [T, this
    rank's inputs] -> [T, outputs], the same on every rank."""

    def __init__(self, inputs: Span, outputs: int, place: Place, *, bias: bool = False) -> None:
        super().__init__(inputs.size, outputs, place, bias=bias)
        self.inputs = inputs
        self.outputs = Span(0, outputs, outputs)
        self._shard = place.shard

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        return {f"{prefix}weight": Cut(1, self.inputs)}

    def freeze(self) -> None:
        super().freeze()
        # Only rank 0 adds the bias, so that the sum contains it once.
        if self._shard.rank:
            self.bias = None

    def __call__(self, x: Tensor) -> Tensor:
        return self.sum(self.share(x))

    def share(self, x: Tensor) -> Tensor:
        """This rank's term of the sum."""
        return super().__call__(x)

    def sum(self, share: Tensor) -> Tensor:
        return self._shard.all_reduce(share)


class Embedding(Layer):
    """Token embedding: ids [T] int64 -> [T, hidden], a new tensor."""

    def __init__(self, vocab_size: int, hidden_size: int, place: Place) -> None:
        self._shard = place.shard
        self._rows = place.shard.padded_span(vocab_size)
        self.weight = place.matrix(self._rows.size, hidden_size)
        self.table: Table | None = None
        """What replaces `weight`, if anything does."""
        # Loading does not fill the padding, and `empty` may contain NaN.
        self.weight[self._rows.filled :].zero_()

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        return {} if self.table is not None else {f"{prefix}weight": self.weight[: self._rows.filled]}

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        return {f"{prefix}weight": Cut(0, self._rows)}

    def hold(self, matrices: Matrices, prefix: str = "") -> None:
        form = matrices.table(f"{prefix}weight", self._rows.size)
        if isinstance(form, Tensor):
            self.weight = form
        else:
            self.table = form
            del self.weight

    @property
    def form(self) -> Tensor | Product:
        """The matrix for a head that is tied to it."""
        return self.weight if self.table is None else self.table.product

    def __call__(self, token_ids: Tensor) -> Tensor:
        if self._shard.size == 1:
            return self._embeddings(token_ids)
        # Each token's row is on exactly one rank; the other ranks contribute zeros to the sum.
        rows = token_ids - self._rows.start
        elsewhere = (rows < 0) | (rows >= self._rows.size)
        embeddings = self._embeddings(rows.masked_fill_(elsewhere, 0))
        return self._shard.all_reduce(embeddings.masked_fill_(elsewhere.unsqueeze(1), 0))

    def _embeddings(self, rows: Tensor) -> Tensor:
        return self.weight.index_select(0, rows) if self.table is None else self.table(rows)


class LMHead(Linear):
    """Output head: [R, hidden] -> logits [R, vocab] on rank 0; undefined on other ranks."""

    def __init__(self, hidden_size: int, vocab_size: int, place: Place) -> None:
        self._shard = place.shard
        self._rows = place.shard.padded_span(vocab_size)
        super().__init__(hidden_size, self._rows.size, place)
        self.weight[self._rows.filled :].zero_()

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        return {} if self._product is not None else {f"{prefix}weight": self.weight[: self._rows.filled]}

    def cuts(self, prefix: str = "") -> dict[str, Cut]:
        return {f"{prefix}weight": Cut(0, self._rows)}

    def __call__(self, x: Tensor) -> Tensor:
        # Only the last ranks have padding rows, so the padding comes after the vocabulary.
        return self._shard.gather(super().__call__(x))[:, : self._rows.total]
