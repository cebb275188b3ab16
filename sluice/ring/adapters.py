"""LoRA adapters on the ring: what a request names, and the files that an adapter consists of."""

from hashlib import blake2b
from typing import Annotated

import msgspec
from msgspec import Meta

from sluice.ring.message import Name

MAX_ID_CHARS = 256
VERSION_BYTES = 16
MAX_FILE_BYTES = 1 << 30
"""Of an adapter's weights."""

AdapterId = Annotated[str, Meta(min_length=1, max_length=MAX_ID_CHARS)]
AdapterVersion = Annotated[str, Meta(pattern=rf"^[0-9a-f]{{{2 * VERSION_BYTES}}}$")]


class Adapter(msgspec.Struct, frozen=True, array_like=True):
    """An adapter as a request names it: the operator's id, and the weights that this id stood for at that moment."""

    id: AdapterId
    version: AdapterVersion
    """Hash of weights and configuration: an id that was loaded again with other weights is another adapter."""
    path: Name = ""
    """Its folder on the engines' machines; empty: its files were uploaded."""


class AdapterFiles(msgspec.Struct, frozen=True, array_like=True):
    """The two files of an adapter as peft saves it."""

    config: bytes
    """adapter_config.json."""
    weights: bytes
    """adapter_model.safetensors."""

    @property
    def version(self) -> str:
        digest = blake2b(digest_size=VERSION_BYTES, person=b"sluice-lora")
        for data in (self.config, self.weights):
            # Each is preceded by its length: otherwise different files could give the same bytes.
            digest.update(len(data).to_bytes(8, "little"))
            digest.update(data)
        return digest.hexdigest()
