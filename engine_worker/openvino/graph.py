"""A native decoder as an OpenVINO graph over T tokens of B sequences.

Paged attention is an operation that OpenVINO exports for its own server alone: its inputs have changed between
versions, which `trial` and tests/engine_worker/openvino find out. Patterns that the CPU plugin fuses (RMSNorm, rotary
embedding) are written as its matchers want them.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import openvino as ov
import torch
from openvino import op as internal
from openvino import opset13 as op
from torch import Tensor

from engine_worker.layers.linear import Linear
from engine_worker.layers.mlp import SwiGLU
from engine_worker.layers.rotary import frequencies
from engine_worker.models.config import DecoderConfig
from engine_worker.models.decoder import CausalLM, DecoderLayer
from engine_worker.openvino.weights import Weights, constant, rows_of
from engine_worker.positions import AXES

INPUTS: tuple[tuple[str, ov.Type, list[int]], ...] = (
    ("token_ids", ov.Type.i32, [-1]),
    # As numbers: what the angles are computed from. Exact up to 2^24. [3 T], token by token, of a model with axes.
    ("positions", ov.Type.f32, [-1]),
    ("past_lengths", ov.Type.i32, [-1]),
    ("query_start", ov.Type.i32, [-1]),
    ("blocks", ov.Type.i32, [-1]),
    ("blocks_start", ov.Type.i32, [-1]),
    ("max_context", ov.Type.i32, []),
    ("rows", ov.Type.i32, [-1]),
    ("kept", ov.Type.i32, [-1]),
    ("virtual_tokens", ov.Type.i32, [-1]),
    ("virtual_rows", ov.Type.f32, [-1, -1]),
)
"""[T], [T], then per sequence: tokens in the cache, index of the first token [B + 1], blocks of all in a row, index of
the first block [B + 1]; the longest context; the tokens whose logits are needed [R]; those whose hidden states are
needed [K]; those that are rows of prompt tables [V], and these rows [V, hidden]. The caches of all layers follow, keys
before values."""


class Graphs(NamedTuple):
    decoder: ov.Model
    """Inputs as in INPUTS -> logits [R, vocab] float32, hidden states [K, hidden] before the last norm and, of each
    output layer in turn, its output [K, hidden]."""
    head: ov.Model
    """Last norm and head: [N, hidden] -> logits [N, vocab] and what the norm gives [N, hidden], over the same
    weights."""


class Step(NamedTuple):
    """Nodes that all layers share."""

    attention: list[ov.Node]
    """past_lengths, query_start, blocks, blocks_start."""
    max_context: ov.Node
    cos: ov.Node
    """[T, 1, 1, head_dim]."""
    sin: ov.Node


def build(model: CausalLM, weights: Weights, output_layers: Sequence[int] = ()) -> Graphs:
    """The plugin chooses shape and type of the caches."""
    config: DecoderConfig = model.config
    inputs = [_parameter(*each) for each in INPUTS]
    token_ids, positions, *attention, max_context, rows, kept, virtual_tokens, virtual_rows = inputs
    step = Step(attention, max_context, *_rotations(config, positions))
    x = rows_of(weights.vocabulary, model.model.embed_tokens.weight, token_ids)
    x = op.scatter_update(x, virtual_tokens, virtual_rows, _int64(0))
    layers: dict[int, ov.Output] = {}
    for index, (layer, window) in enumerate(zip(model.model.layers, config.windows, strict=True)):
        caches = [_parameter(f"{kind}.{index}", ov.Type.dynamic, [-1] * 4) for kind in ("keys", "values")]
        inputs += caches
        x = _layer(layer, config, weights, x, step, caches, window)
        if index in output_layers:
            layers[index] = op.gather(x, kept, _int64(0)).output(0)
    hidden = _parameter("hidden", ov.Type.f32, [-1, config.hidden_size])
    # Before the last norm: an operation on no rows costs each step microseconds.
    kept_rows, head = op.gather(x, kept, _int64(0)), weights.vocabulary.node(model.lm_head.weight)
    drawn, normed = (
        _norm(each, model.model.norm.weight, config.rms_norm_eps) for each in (op.gather(x, rows, _int64(0)), hidden)
    )
    logits, others = (op.matmul(each, head, False, True) for each in (drawn, normed))
    outputs = [logits.output(0), kept_rows.output(0), *(layers[layer] for layer in output_layers)]
    decoder = ov.Model(outputs, inputs, "decoder")
    return Graphs(decoder, ov.Model([others.output(0), normed.output(0)], [hidden], "head"))


def _layer(
    layer: DecoderLayer,
    config: DecoderConfig,
    weights: Weights,
    x: ov.Node,
    step: Step,
    caches: list[ov.Node],
    window: int | None,
) -> ov.Node:
    attention, mlp, eps = layer.self_attn, layer.mlp, config.rms_norm_eps
    if not isinstance(mlp, SwiGLU):
        raise TypeError(f"{type(mlp).__name__} has no graph")
    heads = config.heads
    queries, pairs = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    h = _norm(x, layer.input_layernorm.weight, eps)
    qkv = _split(_linear(attention.qkv_proj, weights, h), [queries, pairs, pairs])
    query = _rotated(qkv[0], heads.num_heads, attention.q_norm.weight if config.head_norms else None, config, step)
    key = _rotated(qkv[1], heads.num_kv_heads, attention.k_norm.weight if config.head_norms else None, config, step)
    attended = _attention([query, key, qkv[2]], caches, config, step, window)
    x = op.add(x, _linear(attention.o_proj, weights, attended))
    h = _norm(x, layer.post_attention_layernorm.weight, eps)
    gate, up = _split(_linear(mlp.gate_up_proj, weights, h), [config.intermediate_size] * 2)
    return op.add(x, _linear(mlp.down_proj, weights, op.multiply(op.swish(gate), up)))


def _attention(
    query_key_value: list[ov.Output], caches: list[ov.Node], config: DecoderConfig, step: Step, window: int | None
) -> ov.Node:
    """Stores keys and values, then attends: [T, heads * head_dim]."""
    heads = config.heads
    no_ids, no_numbers, no_bytes = (op.constant(np.zeros(0, kind)) for kind in (np.int32, np.float32, np.uint8))
    off = op.constant(np.int32(0))
    found = internal._PagedAttentionExtension(
        [
            *query_key_value,
            *(node.output(0) for node in caches),
            *(node.output(0) for node in step.attention),
            *(
                node.output(0)
                for node in (
                    op.constant(np.float32(heads.scale)),
                    op.constant(np.int32(window or 0)),
                    no_numbers,  # ALiBi slopes
                    step.max_context,
                    no_ids,  # score aggregation window
                    *(no_ids, no_ids, no_numbers),  # rotation of cached keys
                    *(no_numbers, off, off),  # sparse attention (XAttention)
                    no_numbers,  # sinks
                    *(off, no_ids, no_ids, no_ids),  # eviction (adaptive R-KV)
                    no_ids,  # token types
                    *(no_bytes, no_ids),  # a bias between queries
                )
            ),
        ]
    )
    info = found.get_rt_info()
    for kind in ("k", "v"):
        info[f"num_{kind}_heads"], info[f"{kind}_head_size"] = heads.num_kv_heads, heads.head_dim
    return found.output(0)


def _rotations(config: DecoderConfig, positions: ov.Node) -> tuple[ov.Node, ov.Node]:
    half = frequencies(config.rope, config.heads.head_dim)
    whole = torch.cat((half, half)).view(1, 1, 1, -1)
    columns = _shape(-1, 1, 1, 1)
    if config.rope.sections is not None:
        axes = _shape(*config.rope.axes(), *config.rope.axes())
        positions = op.gather(op.reshape(positions, _shape(-1, AXES), False), axes, _int64(1))
        columns = _shape(-1, 1, 1, config.heads.head_dim)
    angles = op.multiply(op.reshape(positions, columns, False), constant(whole))
    return op.cos(angles), op.sin(angles)


def _rotated(x: ov.Output, num_heads: int, norm: Tensor | None, config: DecoderConfig, step: Step) -> ov.Output:
    """[T, heads * head_dim], through the norm of each head if there is one, rotated."""
    size = config.heads.head_dim
    # One token per "batch", so that heads are where the fused operation expects them, and nothing is transposed.
    x = op.reshape(x, _shape(-1, num_heads, 1, size), False)
    if norm is not None:
        x = _norm(x, norm, config.rms_norm_eps)
    # Fused only if axes are written like this: 3 here, -1 in the concatenation.
    first, second = op.variadic_split(x, _int64(3), _shape(size // 2, size // 2)).outputs()
    turned = op.concat([op.multiply(second, op.constant(np.float32(-1))), first], -1)
    x = op.add(op.multiply(x, step.cos), op.multiply(turned, step.sin))
    return op.reshape(x, _shape(-1, num_heads * size), False).output(0)


def _norm(x: ov.Node, weight: Tensor, eps: float) -> ov.Node:
    mean = op.reduce_mean(op.power(x, op.constant(np.float32(2))), _shape(-1), True)
    root = op.sqrt(op.add(mean, op.constant(np.float32(eps))))
    return op.multiply(op.multiply(x, op.divide(op.constant(np.float32(1)), root)), constant(weight))


def _linear(layer: Linear, weights: Weights, x: ov.Node | ov.Output) -> ov.Node:
    product = op.matmul(x, weights.layers.node(layer.weight), False, True)
    return product if layer.bias is None else op.add(product, constant(layer.bias))


def _split(x: ov.Node, sizes: list[int]) -> list[ov.Output]:
    found: list[ov.Output] = op.variadic_split(x, _int64(1), _shape(*sizes)).outputs()
    return found


def _parameter(name: str, kind: ov.Type, shape: list[int]) -> ov.Node:
    node = op.parameter(ov.PartialShape(shape), kind)
    node.output(0).set_names({name})
    return node


def _int64(value: int) -> ov.Node:
    return op.constant(np.int64(value))


def _shape(*sizes: int) -> ov.Node:
    return op.constant(np.array(sizes, np.int64))
