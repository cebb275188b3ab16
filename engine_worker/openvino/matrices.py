"""Products with quantized matrices, whose codes stay as the checkpoint stores them.

Where weights are integers whose zeros are integers too, the plugin also quantizes the other operand of a product, and
computes with integers, unless the setting `quantized_activations` is off.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from engine_worker.formats.packing import unpack_pairs
from engine_worker.formats.stored import BYTE_MAX, PAIRS, TABLES, Kind, Stored, kind_of, stack, with_zeros
from engine_worker.openvino.weights import ConstantStore, Format, Weights, constant, kept, stored_node

INTEGERS = ("u4", "i4", "u8", "i8")
LARGEST = {"u4": 15, "u8": BYTE_MAX}
SIGNED = ("i4", "i8")
GROUP_UNIT = 4
"""A group of inputs must be a multiple of it."""


class Matrices(Protocol):
    """The quantized matrices of a model, each of which is read when its turn comes."""

    def read(self, name: str) -> Stored | None:
        """None: it is plain, and in the model. Raises CheckpointError."""


class NoMatrices:
    def read(self, _name: str) -> None:
        return None


NO_MATRICES = NoMatrices()


def keeps(stored: Stored) -> bool:
    """Whether the graph can have the codes as they are. The plugin would convert others, such as FP8, in each call, and
    its products with other groups are wrong."""
    whole_groups = stored.group >= stored.shape[1] or stored.group % GROUP_UNIT == 0
    return stored.type in (*INTEGERS, *TABLES) and stored.shape[1] % stored.group == 0 and whole_groups


def rounds_activations(kind: Kind) -> bool:
    """Whether the plugin quantizes the other operand."""
    return kind.type in INTEGERS


def canonical(stored: Stored) -> Stored:
    """In the form that the graph has. Zero points of signed codes are rare: there is no form of its own for them."""
    return with_zeros(stored) if stored.zeros is not None and stored.type in SIGNED else stored


def _stacked(before: tuple[Format, Stored | Tensor], form: Format, part: Stored | Tensor) -> Stored | Tensor | None:
    """The rows of both; None if they have different formats. Plain ones that are computed together are neighbours in
    memory too: nothing is copied."""
    own_form, rows = before
    if isinstance(rows, Stored) and isinstance(part, Stored):
        return stack([rows, canonical(part)])
    if isinstance(rows, Stored) or isinstance(part, Stored) or form != own_form:
        return None
    return rows.as_strided((len(rows) + len(part), rows.shape[1]), rows.stride())


@dataclass(frozen=True)
class Products:
    """Builds the products of a graph."""

    weights: Weights
    store: ConstantStore
    activations: bool
    """Whether they may be quantized."""

    def linear(self, parts: Mapping[str, Stored | Tensor], x: ov.Node | ov.Output) -> ov.Node:
        """parts: matrices by their names. x [T, K] -> x times the transposed rows of all parts, [T, N]."""
        products = [
            self._product(part, x) if isinstance(part, Stored) else op.matmul(x, form.node(part), False, True)
            for form, part in self._joined(parts)
        ]
        return products[0] if len(products) == 1 else op.concat(products, 1)

    def _joined(self, parts: Mapping[str, Stored | Tensor]) -> list[tuple[Format, Stored | Tensor]]:
        """Neighbours in one matrix, where that is possible."""
        joined: list[tuple[Format, Stored | Tensor]] = []
        for name, part in parts.items():
            form = self.weights.of(name)
            whole = _stacked(joined[-1], form, part) if joined else None
            if whole is None:
                joined.append((form, canonical(part) if isinstance(part, Stored) else part))
            else:
                joined[-1] = form, whole
        return joined

    def kept(self, stored: Stored) -> Stored:
        """The same with codes that the store owns: an embedding that is also the head has them once."""
        stored = canonical(stored)
        return replace(stored, codes=torch.from_numpy(self.store.keep(stored.codes.numpy())))

    def head(self, stored: Stored) -> ov.Node:
        """The vocabulary's matrix as a node of its own, since two graphs share it."""
        return stored_node(canonical(stored), self.store)

    def rows(self, stored: Stored, ids: ov.Node) -> ov.Node:
        """Embedding lookup: ids [T] -> those rows [T, K] float32."""
        axis, (rows, columns) = op.constant(np.int64(0)), stored.shape
        stored = canonical(stored)
        # The plugin gathers bytes, but not parts of bytes.
        codes = unpack_pairs(stored.codes) if stored.type in PAIRS else stored.codes
        if stored.type in TABLES:
            codes = torch.tensor(TABLES[stored.type])[codes.long()]
        elif stored.type == "i4":
            codes = (codes ^ 8).to(torch.int8) - 8
        groups = self._constant(codes.reshape(rows, -1, stored.group))
        node = op.convert(op.gather(groups, ids, axis), ov.Type.f32)
        if stored.zeros is not None:
            node = op.subtract(node, op.gather(self._constant(stored.zeros.unsqueeze(2)), ids, axis))
        node = op.multiply(node, op.gather(self._constant(stored.scales.unsqueeze(2)), ids, axis))
        return op.reshape(node, op.constant(np.array([-1, columns], np.int64)), False)

    def _product(self, stored: Stored, x: ov.Node | ov.Output) -> ov.Node:
        if stored.order is not None:
            x = op.gather(x, op.constant(stored.order.numpy()), op.constant(np.int64(1)))
            stored = replace(stored, order=None)
        if not self.activations or kind_of(stored).zeros != "fraction" or stored.zeros is None:
            return op.matmul(x, stored_node(stored, self.store), False, True)
        # With the nearest integers in their place, the plugin can compute with integers. What is missing is the same
        # for all codes of a group: a multiple of the sum of its inputs.
        near = stored.zeros.round().clamp(0, LARGEST[stored.type])
        rest = (near - stored.zeros) * stored.scales
        product = op.matmul(x, stored_node(replace(stored, zeros=near), self.store), False, True)
        groups = op.reshape(x, op.constant(np.array([0, -1, stored.group], np.int64)), True)
        sums = op.reduce_sum(groups, op.constant(np.array([2], np.int64)), False)
        return op.add(product, op.matmul(sums, constant(rest.contiguous()), False, True))

    def _constant(self, numbers: Tensor) -> ov.Node:
        return kept(numbers, self.store)
