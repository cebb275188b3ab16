"""What not every engine offers and a request may need. A request goes only to engines that offer all that it needs.

An offer is a text of a kind and, for most kinds, a value: `lora`, `tensor:hidden`, `image_rows:64`.
"""

from collections.abc import Iterable
from typing import Annotated, Literal

from msgspec import Meta

Kind = Literal["lora", "logits_processor", "tensor", "prompt_rows", "image_rows"]
"""lora: LoRA adapters. logits_processor, tensor: the one of this name. prompt_rows: rows in place of a prompt's tokens,
with this many values each. image_rows: images that take this many rows each."""
Offer = Annotated[str, Meta(max_length=1100)]
"""A name of the ring with its kind."""
LORA = "lora"


def offer(kind: Kind, value: object) -> Offer:
    return f"{kind}:{value}"


def values_of(kind: Kind, offers: Iterable[Offer]) -> list[str]:
    """The values that are offered of this kind."""
    prefix = f"{kind}:"
    return [each.removeprefix(prefix) for each in offers if each.startswith(prefix)]
