"""Self-attention with grouped-query heads (arXiv:2305.13245)."""

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend, AttentionInputs, HeadShape
from engine_worker.attention.cache import LayerCache
from engine_worker.layers.adapters import LayerAdapters
from engine_worker.layers.layer import Layer
from engine_worker.layers.linear import FusedLinear, SummedLinear
from engine_worker.layers.norm import Normalize, RMSNorm
from engine_worker.layers.rotary import rotate
from engine_worker.layers.shard import Place


class SelfAttention(Layer):
    """Projections and rotation around an attention backend: [T, hidden] -> [T, hidden]."""

    def __init__(
        self,
        hidden_size: int,
        heads: HeadShape,
        backend: AttentionBackend,
        window: int | None,
        place: Place,
        *,
        bias: bool,
        output_bias: bool,
        norm_eps: float | None,
    ) -> None:
        """heads: of the whole model, all ranks. window: number of tokens that a token attends to, itself included.
        norm_eps: eps of an RMSNorm on each query and key head (arXiv:2302.05442); None: no such norm.

        Raises ValueError if the ranks cannot share the heads equally.
        """
        shard = place.shard
        query, kv = (span.times(heads.head_dim) for span in (shard.query_heads(heads), shard.kv_heads(heads)))
        self.qkv_proj = FusedLinear(hidden_size, {"q_proj": query, "k_proj": kv, "v_proj": kv}, place, bias=bias)
        self.o_proj = SummedLinear(query, hidden_size, place, bias=output_bias)
        self._heads = shard.heads(heads)
        self._backend = backend
        self._window = window
        self._norm_eps = norm_eps
        self._norm_weight: Tensor | None = None
        """[heads + kv_heads, head_dim], set by `freeze`: one operation normalizes queries and keys."""
        if norm_eps is not None:
            self.q_norm = RMSNorm(heads.head_dim, norm_eps, place)
            self.k_norm = RMSNorm(heads.head_dim, norm_eps, place)
            self._normalize = Normalize(heads.head_dim, norm_eps, place.device)

    def freeze(self) -> None:
        super().freeze()
        if self._norm_eps is not None:
            query, key = self.q_norm.weight, self.k_norm.weight
            self._norm_weight = torch.cat(
                (query.expand(self._heads.num_heads, -1), key.expand(self._heads.num_kv_heads, -1))
            )
            self._normalize.set_weight(self._norm_weight)

    def rotate(self, query_key: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """Normalize (if the model does) and rotate queries and keys, both [T, heads + kv_heads, head_dim]."""
        if self._kernels is not None:
            return self._kernels.rotate(query_key, rotations, self._norm_weight, self._norm_eps or 0.0)
        return rotate(query_key if self._norm_weight is None else self._normalize(query_key), rotations)

    def __call__(
        self,
        x: Tensor,
        rotations: tuple[Tensor, Tensor],
        cache: LayerCache,
        inputs: AttentionInputs,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        num_heads, num_kv_heads = self._heads.num_heads, self._heads.num_kv_heads
        projected = self.qkv_proj(x)
        if adapters is not None:
            adapters.add("qkv_proj", x, projected)
        # Queries and keys are adjacent in the product, so that one call rotates both.
        qkv = projected.view(len(x), num_heads + 2 * num_kv_heads, self._heads.head_dim)
        query_key = self.rotate(qkv[:, : num_heads + num_kv_heads], rotations)
        query, key, value = query_key[:, :num_heads], query_key[:, num_heads:], qkv[:, num_heads + num_kv_heads :]
        attended = self._backend.attend(query, key, value, cache, inputs, self._window).flatten(1)
        share = self.o_proj.share(attended)
        if adapters is not None:
            adapters.add("o_proj", attended, share)
        return self.o_proj.sum(share)
