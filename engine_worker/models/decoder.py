"""The decoder that the Llama and Qwen families share: pre-norm layers of grouped-query attention and SwiGLU.

Parameters are named as in Hugging Face checkpoints, but that maps of the same input are fused (see `FusedLinear`).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.attention.inputs import AttentionInputs
from engine_worker.layers.attention import SelfAttention
from engine_worker.layers.embedding import Embedding, Head
from engine_worker.layers.layer import Layer
from engine_worker.layers.mlp import SwiGLU
from engine_worker.layers.moe import SparseMoE
from engine_worker.layers.norm import RMSNorm
from engine_worker.layers.rotary import Rotary
from engine_worker.layers.shard import ALONE, Shard
from engine_worker.models.config import DecoderConfig

TIED = "lm_head.weight"
"""What a checkpoint with tied embeddings may leave out."""


FeedForward = SwiGLU | SparseMoE


class DecoderLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x)). What is added last is left to the next layer's norm."""

    def __init__(
        self,
        config: DecoderConfig,
        self_attn: SelfAttention,
        mlp: FeedForward,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(size, eps=eps, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps=eps, dtype=dtype, device=device)

    def __call__(
        self,
        x: Tensor,
        update: Tensor | None,
        rotations: tuple[Tensor, Tensor],
        cache: LayerCache,
        inputs: AttentionInputs,
    ) -> Tensor:
        """x [T, hidden] is changed in place. `update`: what the layer before left -> what this one leaves."""
        update = self.self_attn(self.input_layernorm(x, update), rotations, cache, inputs)
        return self.mlp(self.post_attention_layernorm(x, update))


class Decoder(Layer):
    """Embedding, layers, final norm. `attention`: of a layer with this window; `mlp`: of the layer of this number."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: Callable[[int | None], SelfAttention],
        mlp: Callable[[int], FeedForward],
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device, shard=shard)
        self.layers = [
            DecoderLayer(config, attention(window), mlp(layer), dtype=dtype, device=device)
            for layer, window in enumerate(config.windows)
        ]
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=dtype, device=device)


class CausalLM(Layer):
    """A decoder and its output head. Sees tensors only. `mlp`: of the layer of this number; None: SwiGLU in all."""

    def __init__(
        self,
        config: DecoderConfig,
        attention: Callable[[int | None], SelfAttention],
        mlp: Callable[[int], FeedForward] | None = None,
        *,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = ALONE,
    ) -> None:
        def dense(layer: int) -> FeedForward:  # noqa: ARG001 - all layers are alike
            size, inside = config.hidden_size, config.intermediate_size
            return SwiGLU(size, inside, bias=config.mlp_bias, dtype=dtype, device=device, shard=shard)

        self.config = config
        self.graphs = True
        """See Model."""
        self.model = Decoder(config, attention, mlp or dense, dtype=dtype, device=device, shard=shard)
        self.lm_head = Head(config.hidden_size, config.vocab_size, dtype=dtype, device=device, shard=shard)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rotary = Rotary(config.rope, config.heads.head_dim, dtype, device)

    def __call__(self, token_ids: Tensor, positions: Tensor, cache: KVCache, inputs: AttentionInputs) -> Tensor:
        """token_ids [T] int64, positions [T] int64 -> hidden states [T, hidden], before the head."""
        x = self.model.embed_tokens(token_ids)
        rotations = self._rotary.rotations(positions)
        update = None
        for layer, layer_cache in zip(self.model.layers, cache.layers, strict=True):
            update = layer(x, update, rotations, layer_cache, inputs)
        return self.model.norm(x, update)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, vocab] float32. What other ranks than 0 get means nothing."""
        return self.lm_head(hidden).float()

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        """See Layer."""
        found = super().targets(prefix)
        if self.config.tie_word_embeddings:
            del found[prefix + TIED]
        return found
