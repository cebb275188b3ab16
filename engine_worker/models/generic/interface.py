"""Replaces the attention of transformers' modules, through its AttentionInterface.

https://huggingface.co/docs/transformers/attention_interface
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

SERVED = "sluice"
"""Attention implementation for serving. Registered without a mask function, so that transformers builds no masks: the
paged backend applies the causal mask and the window itself."""
PROBED = "sluice_probe"
"""Attention implementation for `probe`. Its masks have no values and only state their window; see `window_of_mask`."""
PROBED_ROWS = (0.0, 0.3, 0.5, 1.0)
"""Rows of a mask that are inspected, as fractions of the context."""
MAX_PROBED_CONTEXT = 1 << 20
"""Limit, in tokens, of the context for which masks are inspected."""
DEFAULT_CONTEXT = 2048
"""Tokens of context if the model's configuration does not state them."""


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The arguments of one attention layer."""

    module: nn.Module
    query: Tensor
    """[1, heads, T, head_dim]."""
    key: Tensor
    """[1, kv_heads, T, head_dim]."""
    value: Tensor
    """[1, kv_heads, T, value_dim]."""
    mask: Tensor | None
    options: Mapping[str, Any]


Attention = Callable[[AttentionCall], Tensor]
"""Computes attention -> [1, T, heads, value_dim]."""

# A context variable, since not all modules pass keyword arguments through to their attention.
_attention: ContextVar[Attention] = ContextVar("sluice_attention")


@contextmanager
def attention_computed_by(attention: Attention) -> Iterator[None]:
    """Within this block, modules called in this thread compute attention by `attention`."""
    token = _attention.set(attention)
    try:
        yield
    finally:
        _attention.reset(token)


def context_of(config: Any) -> int:
    """The model's longest context in tokens, from transformers' configuration."""
    return getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT


def window_of_mask(mask: Tensor) -> str | int | None:
    """The window of a mask built for `PROBED`; None: causal without a window. A string describes an unsupported
    mask."""
    window: str | int | None = getattr(mask, "window", "a custom mask")
    return window


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    return _attention.get()(AttentionCall(module, query, key, value, attention_mask, options)), None


def _make_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], config: Any, **_: Any) -> Tensor:
    """Classifies the mask by a few of its rows, at the full length of the model's context, and returns a tensor without
    values whose attribute `window` is the result."""
    context = min(context_of(config), MAX_PROBED_CONTEXT)
    rows = torch.tensor([[int(part * (context - 1))] for part in PROBED_ROWS])
    keys = torch.arange(context)[None]
    zero = torch.tensor(0)
    visible = mask_function(zero, zero, rows, keys).expand(len(rows), context)
    width = int(visible[-1].sum())
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    if not torch.equal(visible, (keys <= rows) & (keys > rows - width)):
        mask.window = "a mask that is neither causal nor a sliding window"  # type: ignore[attr-defined]
    else:
        mask.window = width if width < context else None  # type: ignore[attr-defined]
    return mask


for _name in (SERVED, PROBED):
    AttentionInterface.register(_name, _attend)
AttentionMaskInterface.register(PROBED, _make_mask)
