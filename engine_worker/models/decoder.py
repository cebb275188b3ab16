"""The decoder that all native models share: pre-norm layers of grouped-query attention and a feed-forward block.

Attributes are named as in Hugging Face checkpoints, except that projections of the same input are fused (see
`FusedLinear`).
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from engine_worker.attention.backend import AttentionBackend, AttentionInputs
from engine_worker.attention.cache import KVCache, LayerCache
from engine_worker.layers.adapters import LayerAdapters, StepAdapters
from engine_worker.layers.attention import SelfAttention
from engine_worker.layers.layer import Layer, Matrices
from engine_worker.layers.linear import Embedding, LMHead
from engine_worker.layers.mlp import SwiGLU
from engine_worker.layers.moe import SparseMoE
from engine_worker.layers.norm import RMSNorm
from engine_worker.layers.rotary import Rotary
from engine_worker.layers.shard import Place
from engine_worker.models.config import DecoderConfig
from engine_worker.models.model import Embeds, Taps

TIED = "lm_head.weight"
"""The tensor that a checkpoint with tied embeddings may omit."""
EMBEDDING = "model.embed_tokens.weight"

FeedForward = SwiGLU | SparseMoE


class DecoderLayer(Layer):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: DecoderConfig, self_attn: SelfAttention, mlp: FeedForward, place: Place) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.self_attn = self_attn
        self.mlp = mlp
        self.input_layernorm = RMSNorm(size, eps, place)
        self.post_attention_layernorm = RMSNorm(size, eps, place)

    def __call__(
        self,
        x: Tensor,
        update: Tensor | None,
        rotations: tuple[Tensor, Tensor],
        cache: LayerCache,
        inputs: AttentionInputs,
        adapters: LayerAdapters | None = None,
    ) -> Tensor:
        """x [T, hidden], the residual stream, is updated in place.

        `update` [T, hidden] is the output of the previous layer's feed-forward block, which has not been added to x
        yet; the result is that of this layer. The next norm adds it, so that one fused kernel can add and normalize.
        """
        update = self.self_attn(self.input_layernorm(x, update), rotations, cache, inputs, adapters)
        return self.mlp(self.post_attention_layernorm(x, update), adapters)


class DecoderStack(Layer):
    """Embedding, layers and final norm; named "model" in checkpoints."""

    def __init__(self, config: DecoderConfig, layers: list[DecoderLayer], place: Place) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, place)
        self.layers = layers
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)


class CausalLM(Layer):
    """A decoder and its output head; see `Model`."""

    def __init__(
        self,
        config: DecoderConfig,
        backend: AttentionBackend,
        place: Place,
        mlp: Callable[[int], FeedForward] | None = None,
    ) -> None:
        """`mlp`: layer index -> the layer's feed-forward block; None: SwiGLU in every layer."""

        def attention(window: int | None) -> SelfAttention:
            return SelfAttention(
                config.hidden_size,
                config.heads,
                backend,
                window,
                place,
                bias=config.attention_bias,
                output_bias=config.output_bias,
                norm_eps=config.rms_norm_eps if config.head_norms else None,
            )

        def dense(layer: int) -> FeedForward:  # noqa: ARG001 - all layers are alike
            return SwiGLU(config.hidden_size, config.intermediate_size, place, bias=config.mlp_bias)

        make_mlp = mlp or dense
        layers = [
            DecoderLayer(config, attention(window), make_mlp(layer), place)
            for layer, window in enumerate(config.windows)
        ]
        self.config = config
        self.graphs = True
        self.takes_embeds = True
        self.has_taps = True
        self.has_axes = config.rope.sections is not None
        self.model = DecoderStack(config, layers, place)
        self.lm_head = LMHead(config.hidden_size, config.vocab_size, place)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rotary = Rotary(config.rope, config.heads.head_dim, place.dtype, place.device)

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
        x = self.model.embed_tokens(token_ids)
        if embeds is not None:
            embeds.replace_rows(x)
        # All layers use the same rotations.
        rotations = self._rotary.rotations(positions)
        update = None
        for number, (layer, layer_cache) in enumerate(zip(self.model.layers, cache.layers, strict=True)):
            layer_adapters = None if adapters is None else LayerAdapters(adapters, number)
            update = layer(x, update, rotations, layer_cache, inputs, layer_adapters)
            if taps is not None:
                taps.add(number, x, update)
        return self.model.norm(x, update)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden).float()

    def untie(self) -> None:
        """Give the head a matrix of its own. Call it before the weights are loaded."""
        # Zeros, because loading does not fill a rank's padding.
        self.lm_head.weight = torch.zeros_like(self.model.embed_tokens.weight)
        self.config = replace(self.config, tie_word_embeddings=False)

    def targets(self, prefix: str = "") -> dict[str, Tensor]:
        targets = super().targets(prefix)
        if self.config.tie_word_embeddings:
            targets.pop(prefix + TIED, None)
        return targets

    def hold(self, matrices: Matrices, prefix: str = "") -> None:
        self.model.hold(matrices, f"{prefix}model.")
        if self.config.tie_word_embeddings:
            self.lm_head.keep(self.model.embed_tokens.form)
        else:
            self.lm_head.hold(matrices, f"{prefix}lm_head.")
