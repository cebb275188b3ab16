"""Self-attention with grouped-query heads."""

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend, HeadShape
from engine_worker.attention.cache import LayerCache
from engine_worker.attention.inputs import AttentionInputs
from engine_worker.layers.layer import Layer
from engine_worker.layers.linear import FusedLinear, SummedLinear
from engine_worker.layers.norm import Normalize, RMSNorm
from engine_worker.layers.rotary import rotate
from engine_worker.layers.shard import ALONE, Shard


class SelfAttention(Layer):
    """Projections and rotation around an attention backend. `window`: a token sees the last that many tokens."""

    def __init__(
        self,
        hidden_size: int,
        heads: HeadShape,
        backend: AttentionBackend,
        window: int | None,
        *,
        bias: bool,
        output_bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        """`heads`: of the whole model. Raises ValueError where the ranks cannot share them."""
        queries, pairs = (part.times(heads.head_dim) for part in (shard.query_heads(heads), shard.kv_heads(heads)))
        self.qkv_proj = FusedLinear(
            hidden_size, {"q_proj": queries, "k_proj": pairs, "v_proj": pairs}, bias=bias, dtype=dtype, device=device
        )
        self.o_proj = SummedLinear(queries, hidden_size, bias=output_bias, dtype=dtype, device=device, shard=shard)
        self._heads = shard.heads(heads)
        self._backend = backend
        self._window = window

    def turn(self, query_key: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """Queries and keys together, [T, heads + kv_heads, head_dim], as attention gets them."""
        if self._kernels is not None:
            return self._kernels.turn(query_key, rotations, None, 0.0)
        return rotate(query_key, rotations)

    def __call__(
        self, x: Tensor, rotations: tuple[Tensor, Tensor], cache: LayerCache, inputs: AttentionInputs
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        num_heads, num_kv_heads = self._heads.num_heads, self._heads.num_kv_heads
        qkv = self.qkv_proj(x).view(len(x), num_heads + 2 * num_kv_heads, self._heads.head_dim)
        query_key = self.turn(qkv[:, : num_heads + num_kv_heads], rotations)
        query, key, value = query_key[:, :num_heads], query_key[:, num_heads:], qkv[:, num_heads + num_kv_heads :]
        return self.o_proj(self._backend.attend(query, key, value, cache, inputs, self._window).flatten(1))


class NormedSelfAttention(SelfAttention):
    """With RMSNorm of each query and key head (arXiv:2302.05442)."""

    def __init__(
        self,
        hidden_size: int,
        heads: HeadShape,
        backend: AttentionBackend,
        window: int | None,
        *,
        bias: bool,
        output_bias: bool,
        eps: float,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        super().__init__(
            hidden_size,
            heads,
            backend,
            window,
            bias=bias,
            output_bias=output_bias,
            dtype=dtype,
            device=device,
            shard=shard,
        )
        self.q_norm = RMSNorm(heads.head_dim, eps=eps, dtype=dtype, device=device)
        self.k_norm = RMSNorm(heads.head_dim, eps=eps, dtype=dtype, device=device)
        self._normalize = Normalize(heads.head_dim, eps, device)
        self._rows = torch.empty(0, dtype=dtype, device=device)
        self._eps = eps

    def freeze(self) -> None:
        """See Layer. One weight [heads + kv_heads, head_dim] does for both norms."""
        super().freeze()
        query, key = self.q_norm.weight, self.k_norm.weight
        self._rows = torch.cat((query.expand(self._heads.num_heads, -1), key.expand(self._heads.num_kv_heads, -1)))
        self._normalize.weigh(self._rows)

    def turn(self, query_key: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """See SelfAttention."""
        if self._kernels is not None:
            return self._kernels.turn(query_key, rotations, self._rows, self._eps)
        return rotate(self._normalize(query_key), rotations)
