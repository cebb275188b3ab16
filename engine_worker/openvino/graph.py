"""Builds a native decoder as an OpenVINO graph over T tokens of B sequences.

Paged attention is an internal operation, which OpenVINO exports only for its own model server. Its inputs have changed
between versions; `trial` and tests/engine_worker/openvino detect such a change. RMSNorm and rotary embedding are
written in the exact form that the CPU plugin's pattern matchers fuse.
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
from engine_worker.models.decoder import EMBEDDING, TIED, CausalLM, DecoderLayer
from engine_worker.openvino.adapters import AdaptedLinear, GraphAdapters
from engine_worker.openvino.matrices import NO_MATRICES, Matrices, Products
from engine_worker.openvino.weights import constant, rows_of
from engine_worker.positions import AXES

INPUTS: tuple[tuple[str, ov.Type, list[int]], ...] = (
    ("token_ids", ov.Type.i32, [-1]),
    # Rotary positions, float32 since the angles are computed from them: exact up to 2^24. [3 T], the three axes of each
    # token in turn, for a model with M-RoPE.
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
"""Name, type and shape of the decoder's inputs. The keys and values caches of each layer in turn follow them,
then, if the graph has adapters, `GraphAdapters.parameter`.

- token_ids [T], positions [T]
- past_lengths [B]: tokens of the sequence that are in the cache
- query_start [B + 1]: index of the sequence's first token
- blocks: the block tables of all sequences, concatenated; blocks_start [B + 1]: index of the sequence's first block
- max_context: tokens of the longest context
- rows [R]: indexes of the tokens whose logits are returned
- kept [K]: indexes of the tokens whose hidden states are returned
- virtual_tokens [V], virtual_rows [V, hidden]: indexes of the tokens whose embedding is a row of a prompt table, and
  these rows
"""


class Graphs(NamedTuple):
    decoder: ov.Model
    """Inputs as in INPUTS -> logits [R, vocab] float32, hidden states [K, hidden] before the last norm, and the output
    [K, hidden] of each output layer in turn."""
    head: ov.Model
    """The last norm and the head, which shares the decoder's weights: hidden states [N, hidden] -> logits [N, vocab],
    output of the norm [N, hidden]."""


class Step(NamedTuple):
    """Nodes that all layers share."""

    attention: list[ov.Node]
    """The inputs past_lengths, query_start, blocks and blocks_start."""
    max_context: ov.Node
    cos: ov.Node
    """[T, 1, 1, head_dim], like `sin`."""
    sin: ov.Node


class Linears(NamedTuple):
    """How the linear layers of a decoder layer are built."""

    products: Products
    matrices: Matrices
    adapters: GraphAdapters | None
    layer: int
    """Index of the decoder layer."""

    def product(self, name: str, linear: Linear, x: ov.Node | ov.Output) -> ov.Node:
        """name: "self_attn.qkv_proj" and such."""
        targets = linear.targets(f"model.layers.{self.layer}.{name}.")
        weights = {each: target for each, target in targets.items() if each.endswith(".weight")}
        product = self.products.linear({each: self.matrices.read(each) or weights[each] for each in weights}, x)
        if linear.bias is not None:
            product = op.add(product, constant(linear.bias))
        if self.adapters is None:
            return product
        own_name = name.rpartition(".")[2]
        return self.adapters.add(AdaptedLinear(self.layer, own_name, *reversed(linear.weight.shape)), x, product)


def build(
    model: CausalLM,
    products: Products,
    output_layers: Sequence[int] = (),
    adapters: GraphAdapters | None = None,
    matrices: Matrices = NO_MATRICES,
) -> Graphs:
    """Build both graphs. Shape and type of the cache inputs are dynamic: the plugin chooses them."""
    config, vocabulary = model.config, products.weights.of(EMBEDDING)
    inputs = [_parameter(*declared) for declared in INPUTS]
    token_ids, positions, *attention, max_context, rows, kept, virtual_tokens, virtual_rows = inputs
    step = Step(attention, max_context, *_rotations(config, positions))
    table = matrices.read(EMBEDDING)
    table = products.kept(table) if table else None
    x = products.rows(table, token_ids) if table else rows_of(vocabulary, model.model.embed_tokens.weight, token_ids)
    x = op.scatter_update(x, virtual_tokens, virtual_rows, _int64(0))
    layers: dict[int, ov.Output] = {}
    for index, (layer, window) in enumerate(zip(model.model.layers, config.windows, strict=True)):
        caches = [_parameter(f"{kind}.{index}", ov.Type.dynamic, [-1] * 4) for kind in ("keys", "values")]
        inputs += caches
        linears = Linears(products, matrices, adapters, index)
        x = _layer(layer, config, linears, x, step, caches, window)
        if index in output_layers:
            layers[index] = op.gather(x, kept, _int64(0)).output(0)
    hidden = _parameter("hidden", ov.Type.f32, [-1, config.hidden_size])
    if adapters is not None:
        inputs.append(adapters.parameter)
    # Kept rows are returned before the last norm, which the head graph computes: most steps return no such rows, and
    # even an operation on no rows costs microseconds.
    kept_rows = op.gather(x, kept, _int64(0))
    own_head = table if config.tie_word_embeddings else matrices.read(TIED)
    head = products.head(own_head) if own_head else vocabulary.node(model.lm_head.weight)
    sampled_rows = op.gather(x, rows, _int64(0))
    normed_sampled, normed_hidden = (
        _norm(states, model.model.norm.weight, config.rms_norm_eps) for states in (sampled_rows, hidden)
    )
    logits, head_logits = (op.matmul(states, head, False, True) for states in (normed_sampled, normed_hidden))
    outputs = [logits.output(0), kept_rows.output(0), *(layers[layer] for layer in output_layers)]
    decoder = ov.Model(outputs, inputs, "decoder")
    return Graphs(decoder, ov.Model([head_logits.output(0), normed_hidden.output(0)], [hidden], "head"))


def _layer(
    layer: DecoderLayer,
    config: DecoderConfig,
    linears: Linears,
    x: ov.Node,
    step: Step,
    caches: list[ov.Node],
    window: int | None,
) -> ov.Node:
    attention, mlp, eps = layer.self_attn, layer.mlp, config.rms_norm_eps
    if not isinstance(mlp, SwiGLU):
        raise TypeError(f"{type(mlp).__name__} cannot be built as an OpenVINO graph")
    heads = config.heads
    query_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    h = _norm(x, layer.input_layernorm.weight, eps)
    qkv = _split(linears.product("self_attn.qkv_proj", attention.qkv_proj, h), [query_size, kv_size, kv_size])
    query = _rotated(qkv[0], heads.num_heads, attention.q_norm.weight if config.head_norms else None, config, step)
    key = _rotated(qkv[1], heads.num_kv_heads, attention.k_norm.weight if config.head_norms else None, config, step)
    attended = _attention([query, key, qkv[2]], caches, config, step, window)
    x = op.add(x, linears.product("self_attn.o_proj", attention.o_proj, attended))
    h = _norm(x, layer.post_attention_layernorm.weight, eps)
    gate, up = _split(linears.product("mlp.gate_up_proj", mlp.gate_up_proj, h), [config.intermediate_size] * 2)
    return op.add(x, linears.product("mlp.down_proj", mlp.down_proj, op.multiply(op.swish(gate), up)))


def _attention(
    query_key_value: list[ov.Output], caches: list[ov.Node], config: DecoderConfig, step: Step, window: int | None
) -> ov.Node:
    """Store keys and values in the caches, then attend -> [T, heads * head_dim]."""
    heads = config.heads
    no_ids, no_numbers, no_bytes = (op.constant(np.zeros(0, kind)) for kind in (np.int32, np.float32, np.uint8))
    off = op.constant(np.int32(0))
    node = internal._PagedAttentionExtension(
        [
            *query_key_value,
            *(cache.output(0) for cache in caches),
            *(operand.output(0) for operand in step.attention),
            *(
                operand.output(0)
                for operand in (
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
    info = node.get_rt_info()
    for kind in ("k", "v"):
        info[f"num_{kind}_heads"], info[f"{kind}_head_size"] = heads.num_kv_heads, heads.head_dim
    return node.output(0)


def _rotations(config: DecoderConfig, positions: ov.Node) -> tuple[ov.Node, ov.Node]:
    """Cosines and sines of the rotary embedding, each [T, 1, 1, head_dim]."""
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
    """x [T, heads * head_dim] -> the same shape: normalized per head with the weights `norm`, if any, then rotated."""
    size = config.heads.head_dim
    # Tokens as the batch dimension: heads are then where the fused operation expects them, without a transposition.
    x = op.reshape(x, _shape(-1, num_heads, 1, size), False)
    if norm is not None:
        x = _norm(x, norm, config.rms_norm_eps)
    # The plugin fuses this only with the axis written as 3 in the split and as -1 in the concatenation.
    first, second = op.variadic_split(x, _int64(3), _shape(size // 2, size // 2)).outputs()
    half_turned = op.concat([op.multiply(second, op.constant(np.float32(-1))), first], -1)
    x = op.add(op.multiply(x, step.cos), op.multiply(half_turned, step.sin))
    return op.reshape(x, _shape(-1, num_heads * size), False).output(0)


def _norm(x: ov.Node, weight: Tensor, eps: float) -> ov.Node:
    mean = op.reduce_mean(op.power(x, op.constant(np.float32(2))), _shape(-1), True)
    root = op.sqrt(op.add(mean, op.constant(np.float32(eps))))
    return op.multiply(op.multiply(x, op.divide(op.constant(np.float32(1)), root)), constant(weight))


def _split(x: ov.Node, sizes: list[int]) -> list[ov.Output]:
    outputs: list[ov.Output] = op.variadic_split(x, _int64(1), _shape(*sizes)).outputs()
    return outputs


def _parameter(name: str, kind: ov.Type, shape: list[int]) -> ov.Node:
    node = op.parameter(ov.PartialShape(shape), kind)
    node.output(0).set_names({name})
    return node


def _int64(value: int) -> ov.Node:
    return op.constant(np.int64(value))


def _shape(*sizes: int) -> ov.Node:
    return op.constant(np.array(sizes, np.int64))
