"""Determines the attention that a module requires, by running it on the meta device, where nothing is computed."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine_worker.attention.backend import HeadShape
from engine_worker.models.config import Windows
from engine_worker.models.generic.interface import PROBED, AttentionCall, attention_computed_by, window_of_mask
from engine_worker.models.generic.source import Source, build
from sluice.checkpoint.errors import CheckpointError

TOKENS = 23
"""Tokens of the probe: a prime that is not a number of heads or experts, so that a dimension of this size must be the
tokens."""
META = torch.device("meta")
UNDERSTOOD = frozenset(
    {"dropout", "is_causal", "output_attentions", "position_ids", "scaling", "sliding_window", "use_cache"}
)
"""Attention options that are supported: `scaling` is used, the others only repeat the mask and the positions or do not
matter when serving. Any other option is refused."""
INDICES = ("index", "indices")
"""Names of operator arguments whose values select or place elements, but do not enter the result."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The attention layers of a module, by name in call order."""

    modules: tuple[str, ...]
    heads: HeadShape
    windows: Windows


def probe(source: Source) -> Probed:
    """Raises CheckpointError if the module requires something that the paged cache does not support."""
    # Meta tensors have no values, so the run must not depend on the chosen experts: with batched products it does not.
    config = copy.deepcopy(source.config)
    config._experts_implementation = "batched_mm"
    calls: list[AttentionCall] = []
    counts = TokenCountTracer(TOKENS)

    def record(call: AttentionCall) -> Tensor:
        calls.append(call)
        value = call.value.repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
        return value.transpose(1, 2).contiguous()

    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device=META)
    try:
        module = build(Source(source.module_class, config), PROBED, torch.bfloat16, META).eval()
        with attention_computed_by(record), torch.inference_mode(), counts:
            output = module.get_decoder()(
                input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            )
    except Exception as error:
        raise CheckpointError(
            f"{source.name} cannot run on the tokens of many sequences in one row, or its operations depend on values: "
            f"{type(error).__name__}: {error}"
        ) from error
    names = {part: name for name, part in module.named_modules()}
    modules = tuple(names[call.module] for call in calls)
    _check_layers(source, modules)
    probed = Probed(modules, _heads(source, calls), tuple(_window(source, call) for call in calls))
    # A step contains tokens of many sequences, so their number must not influence the result.
    if counts.reach(output.last_hidden_state, *(part for call in calls for part in (call.query, call.key, call.value))):
        raise CheckpointError(f"{source.name} uses the number of tokens in a step")
    return probed


def _check_layers(source: Source, modules: tuple[str, ...]) -> None:
    layers = int(source.config.num_hidden_layers)
    if len(modules) != layers or len(set(modules)) != layers:
        raise CheckpointError(
            f"{source.name} has {layers} layers, and calls attention {len(modules)} times in {len(set(modules))} of "
            "them: every layer must call it once"
        )


def _heads(source: Source, calls: Iterable[AttentionCall]) -> HeadShape:
    shapes = {_shape(source, call) for call in calls}
    if len(shapes) > 1:
        different = ", ".join(sorted(map(str, shapes)))
        raise CheckpointError(f"{source.name} has layers with different heads, which is not supported: {different}")
    return shapes.pop()


def _shape(source: Source, call: AttentionCall) -> HeadShape:
    _, num_heads, queries, head_dim = call.query.shape
    _, num_kv_heads, keys, value_dim = call.value.shape
    if (queries, keys) != (TOKENS, TOKENS) or call.key.shape != (1, num_kv_heads, keys, head_dim):
        raise CheckpointError(
            f"{source.name} has attention with unsupported shapes: queries {list(call.query.shape)}, keys "
            f"{list(call.key.shape)}, values {list(call.value.shape)}"
        )
    if num_heads % num_kv_heads or value_dim > head_dim:
        raise CheckpointError(
            f"{source.name} has unsupported heads: {num_heads} query heads of dimension {head_dim} over {num_kv_heads} "
            f"KV heads with values of dimension {value_dim}"
        )
    scale = call.options.get("scaling")
    return HeadShape(num_heads, num_kv_heads, head_dim, None if scale is None else float(scale))


def _window(source: Source, call: AttentionCall) -> int | None:
    unsupported = sorted(
        name
        for name, value in call.options.items()
        if name not in UNDERSTOOD and value is not None and value is not False
    )
    if unsupported:
        raise CheckpointError(f"{source.name} passes {', '.join(unsupported)} to attention, which is not supported")
    if call.mask is not None:
        window = window_of_mask(call.mask)
        if isinstance(window, str):
            raise CheckpointError(f"{source.name} uses {window}, which is not supported")
        return window
    if call.options.get("sliding_window") is not None:
        raise CheckpointError(f"{source.name} has a sliding window without a mask, which is not supported")
    causal = call.options.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        raise CheckpointError(f"{source.name} has attention that is not causal, which is not supported")
    return None


class TokenCountTracer(TorchDispatchMode):
    """Taint tracking: marks every tensor computed from a number of tokens that the module itself has counted.

    Comparing outputs on a few tokens would not detect this influence, which may begin at thousands of tokens. Rows
    selected by a count are not marked: `check_independence` detects wrong positions.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._counted: dict[int, Tensor] = {}
        """Tainted tensors by the id of their storage. The references keep a storage, and its id, from being reused."""

    def reach(self, *tensors: Tensor) -> bool:
        """Whether any of these tensors depends on a count."""
        return any(_storage_id(tensor) in self._counted for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self._counts(func, result) or self.reach(*_operands(func, args, kwargs)):
            self._counted |= {_storage_id(tensor): tensor for tensor in _tensors(result)}
        return result

    def _counts(self, func: Any, result: Any) -> bool:
        """Whether this operator counts the tokens."""
        name = func._schema.name
        if name == "aten::arange":
            return result.numel() == self._tokens
        return name in ("aten::cumsum", "aten::cumsum_") and self._tokens in result.shape


def _operands(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors whose values enter the result."""
    named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    values = [value for name, value in (*named, *kwargs.items()) if name not in INDICES]
    return _tensors(values)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _storage_id(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
