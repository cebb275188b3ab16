"""LoRA adapters in the graph: an operation behind each linear layer adds the products of the step's adapters.

The operation calls the kernel of `engine_worker.lora`, row by row, so that a row has the same bits in every batch.
Products of matrices in the graph would multiply each row with the adapters of all rows, in an order of summation that
depends on their number. The plugin takes tens of microseconds to call Python, so the operation is in a branch
that steps without adapters skip.
"""

from typing import NamedTuple

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as op
from torch import Tensor

from engine_worker.layers.adapters import StepAdapters

NAME = "with_adapters"
"""Input of the graph, bool: whether the step has adapters."""


class AdaptedLinear(NamedTuple):
    """A linear layer, named as in `StepAdapters.add`."""

    layer: int
    name: str
    inputs: int
    outputs: int


class GraphAdapters:
    """Gives the adapters of each step to the graph's operations."""

    def __init__(self) -> None:
        self.step: StepAdapters | None = None
        self.error: Exception | None = None
        """Raised by an operation of the latest step."""
        self.flag = np.zeros((), np.bool_)
        """The value of `parameter`."""
        self.parameter = op.parameter(ov.PartialShape([]), ov.Type.boolean)
        self.parameter.output(0).set_names({NAME})

    def use(self, step: StepAdapters | None) -> None:
        """Set the adapters of the next step."""
        self.step, self.error = step, None
        self.flag[...] = step is not None

    def check(self) -> None:
        """Raises RuntimeError if an operation of the latest step failed."""
        if self.error is not None:
            raise RuntimeError(f"the products of LoRA adapters failed: {self.error!r}") from self.error

    def add_products(self, linear: AdaptedLinear, x: Tensor, out: Tensor) -> None:
        """Add those of the step's adapters; see `StepAdapters.add`. Errors are reported by `check`: the plugin would
        lose them, and leave its threads in an undefined state."""
        try:
            if self.step is None:
                raise RuntimeError("the step has no adapters")
            self.step.add(linear.layer, linear.name, x, out)
        except Exception as error:  # noqa: BLE001 - reported by `check`
            self.error = error

    def add(self, linear: AdaptedLinear, x: ov.Node | ov.Output, product: ov.Node) -> ov.Node:
        """The layer's product [T, outputs] plus those of the adapters with `x` [T, inputs]."""
        base, plain = (_rows(linear.outputs) for _ in range(2))
        inputs = _rows(linear.inputs)
        total = op.add(base, _Products(self, linear, [inputs.output(0)]))
        then_body = ov.Model([op.result(total)], [base, inputs], "with adapters")
        # The branch must not return the summand alone: the plugin would add it within the linear layer, and expect one
        # of the same shape.
        else_body = ov.Model([op.result(plain)], [plain], "without adapters")
        branch = op.if_op(self.parameter)
        branch.set_then_body(then_body)
        branch.set_else_body(else_body)
        branch.set_input(product.output(0), base, plain)
        branch.set_input(x.output(0) if isinstance(x, ov.Node) else x, inputs, None)
        branch.set_output(then_body.results[0], else_body.results[0])
        return branch


class _Products(ov.Op):
    """x [T, inputs] -> the sum of the adapters' products [T, outputs], zeros in rows without an adapter. OpenVINO
    requires these methods of an operation."""

    def __init__(self, adapters: GraphAdapters, linear: AdaptedLinear, inputs: list[ov.Output]) -> None:
        self._adapters = adapters
        self._linear = linear
        super().__init__(self, inputs)

    def validate_and_infer_types(self) -> None:
        self.set_output_type(
            0, ov.Type.f32, ov.PartialShape([self.get_input_partial_shape(0)[0], self._linear.outputs])
        )

    def clone_with_new_inputs(self, inputs: list[ov.Output]) -> "_Products":
        return _Products(self._adapters, self._linear, inputs)

    def visit_attributes(self, _visitor: object) -> bool:
        return True

    def has_evaluate(self) -> bool:
        return True

    def evaluate(self, outputs: ov.TensorVector, inputs: ov.TensorVector) -> bool:
        x, products = inputs[0].data, outputs[0].data
        products[...] = 0
        self._adapters.add_products(self._linear, torch.from_numpy(x), torch.from_numpy(products))
        return True


def _rows(size: int) -> ov.Node:
    """A parameter [T, size]."""
    return op.parameter(ov.PartialShape([-1, size]), ov.Type.f32)
