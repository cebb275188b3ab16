"""Finds out what a module requires of attention, by running it on the meta device, where nothing is computed."""

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
from sluice.ring.checkpoint import CheckpointError

TOKENS = 23
"""A prime that is no number of heads or experts, so a dimension of this size is the tokens."""
META = torch.device("meta")
UNDERSTOOD = frozenset(
    {"dropout", "is_causal", "output_attentions", "position_ids", "scaling", "sliding_window", "use_cache"}
)
"""Attention options that add nothing to the mask and the positions, and the scale of the scores, which is used."""
INDICES = ("index", "indices")
"""Names of arguments that select or place values, but do not contribute any."""


@dataclass(frozen=True, slots=True)
class Probed:
    """The attention layers of a module, by name in call order."""

    modules: tuple[str, ...]
    heads: HeadShape
    windows: Windows


def probe(source: Source) -> Probed:
    """Raises CheckpointError if the module does something that the paged cache cannot serve."""
    # Meta tensors have no values, so nothing may depend on which experts are chosen: batched products do not.
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
            found = module.get_decoder()(
                input_ids=ids, position_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False
            )
    except Exception as error:
        raise CheckpointError(
            f"{source.name} does not run on tokens of many sequences side by side, or not without looking at values: "
            f"{type(error).__name__}: {error}"
        ) from error
    names = {part: name for name, part in module.named_modules()}
    modules = tuple(names[call.module] for call in calls)
    _check_layers(source, modules)
    probed = Probed(modules, _heads(source, calls), tuple(_window(source, call) for call in calls))
    # A step holds tokens of many sequences, so the number of its tokens must not influence the result.
    if counts.reach(found.last_hidden_state, *(part for call in calls for part in (call.query, call.key, call.value))):
        raise CheckpointError(f"{source.name} counts the tokens of a step itself")
    return probed


def _check_layers(source: Source, modules: tuple[str, ...]) -> None:
    layers = int(source.config.num_hidden_layers)
    if len(modules) != layers or len(set(modules)) != layers:
        raise CheckpointError(
            f"{source.name} has {layers} layers, and asks for attention {len(modules)} times in "
            f"{len(set(modules))} of them: every layer has to ask once"
        )


def _heads(source: Source, calls: Iterable[AttentionCall]) -> HeadShape:
    found = {_shape(source, call) for call in calls}
    if len(found) > 1:
        shapes = ", ".join(sorted(map(str, found)))
        raise CheckpointError(f"{source.name} has layers with different heads: {shapes}")
    return found.pop()


def _shape(source: Source, call: AttentionCall) -> HeadShape:
    _, num_heads, queries, head_dim = call.query.shape
    _, num_kv_heads, keys, value_dim = call.value.shape
    if (queries, keys) != (TOKENS, TOKENS) or call.key.shape != (1, num_kv_heads, keys, head_dim):
        raise CheckpointError(
            f"{source.name} attends with queries {list(call.query.shape)}, keys {list(call.key.shape)} and values "
            f"{list(call.value.shape)}"
        )
    if num_heads % num_kv_heads or value_dim > head_dim:
        raise CheckpointError(
            f"{source.name} has {num_heads} heads of {head_dim} over {num_kv_heads} KV heads of {value_dim}"
        )
    scale = call.options.get("scaling")
    return HeadShape(num_heads, num_kv_heads, head_dim, None if scale is None else float(scale))


def _window(source: Source, call: AttentionCall) -> int | None:
    odd = sorted(
        name
        for name, value in call.options.items()
        if name not in UNDERSTOOD and value is not None and value is not False
    )
    if odd:
        raise CheckpointError(f"{source.name} passes {', '.join(odd)} to attention, which is not supported")
    if call.mask is not None:
        seen = window_of_mask(call.mask)
        if isinstance(seen, str):
            raise CheckpointError(f"{source.name} attends through {seen}")
        return seen
    if call.options.get("sliding_window") is not None:
        raise CheckpointError(f"{source.name} asks for a sliding window without a mask that shows it")
    causal = call.options.get("is_causal")
    if not (getattr(call.module, "is_causal", True) if causal is None else causal):
        raise CheckpointError(f"{source.name} attends to what comes after a token")
    return None


class TokenCountTracer(TorchDispatchMode):
    """Taint tracking: follows a module's own count of the tokens in a step through everything computed from it.

    A run on a few tokens would not show such an influence, which may begin at thousands of tokens. Rows selected by a
    count are not tainted: `check_independence` notices wrong positions.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self._tokens = tokens
        self._counted: dict[int, Tensor] = {}
        """Tainted tensors by their storage. Kept alive, so that the storage is not reused."""

    def reach(self, *tensors: Tensor) -> bool:
        """Whether any of them depends on a count."""
        return any(_memory(tensor) in self._counted for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        if self._counts(func, found) or self.reach(*_numbers(func, args, kwargs)):
            self._counted |= {_memory(tensor): tensor for tensor in _tensors(found)}
        return found

    def _counts(self, func: Any, found: Any) -> bool:
        name = func._schema.name
        if name == "aten::arange":
            return found.numel() == self._tokens
        return name in ("aten::cumsum", "aten::cumsum_") and self._tokens in found.shape


def _numbers(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Tensors whose values contribute to the result."""
    named = zip((argument.name for argument in func._schema.arguments), args, strict=False)
    given = [value for name, value in (*named, *kwargs.items()) if name not in INDICES]
    return _tensors(given)


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
