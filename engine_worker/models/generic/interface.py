"""How transformers' modules get attention from outside: its AttentionInterface.

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
"""Attention that sees to its masks itself; transformers makes none."""
PROBED = "sluice_probe"
"""The same with masks whose content is a word: `seen_by`."""
PROBED_ROWS = (0.0, 0.3, 0.5, 1.0)
MAX_PROBED_CONTEXT = 1 << 20
DEFAULT_CONTEXT = 2048


@dataclass(frozen=True, slots=True)
class Call:
    """What an attention layer of a module asks for."""

    module: nn.Module
    query: Tensor
    """[1, heads, T, head_dim]."""
    key: Tensor
    """[1, kv_heads, T, head_dim]."""
    value: Tensor
    """[1, kv_heads, T, value_dim]."""
    mask: Tensor | None
    options: Mapping[str, Any]


Answer = Callable[[Call], Tensor]
"""Gives [1, T, heads, value_dim]."""

_answer: ContextVar[Answer] = ContextVar("sluice_attention")


@contextmanager
def answered_by(answer: Answer) -> Iterator[None]:
    """What modules ask for in here, in this thread, `answer` gives. Not all of them pass keyword arguments through."""
    token = _answer.set(answer)
    try:
        yield
    finally:
        _answer.reset(token)


def seen_by(mask: Tensor) -> str | int | None:
    """What a mask made for `PROBED` says: how many tokens are seen, None for all up to oneself, or what is the matter
    with it."""
    found: str | int | None = getattr(mask, "seen", "a mask of its own making")
    return found


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **options: Any
) -> tuple[Tensor, None]:
    return _answer.get()(Call(module, query, key, value, attention_mask, options)), None


def _make_mask(*, q_length: int, kv_length: int, mask_function: Callable[..., Tensor], config: Any, **_: Any) -> Tensor:
    """Looks at some rows of the mask as long as the model's context."""
    context = min(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT, MAX_PROBED_CONTEXT)
    rows = torch.tensor([[int(part * (context - 1))] for part in PROBED_ROWS])
    keys = torch.arange(context)[None]
    zero = torch.tensor(0)
    seen = mask_function(zero, zero, rows, keys).expand(len(rows), context)
    width = int(seen[-1].sum())
    mask = torch.empty(1, 1, q_length, kv_length, device="meta")
    if not torch.equal(seen, (keys <= rows) & (keys > rows - width)):
        mask.seen = "a mask that is neither causal nor a sliding window"  # type: ignore[attr-defined]
    else:
        mask.seen = width if width < context else None  # type: ignore[attr-defined]
    return mask


for _name in (SERVED, PROBED):
    AttentionInterface.register(_name, _attend)
AttentionMaskInterface.register(PROBED, _make_mask)
