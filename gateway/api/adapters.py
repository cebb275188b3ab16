"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as in vLLM."""

from collections.abc import Sequence

import msgspec

from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway, ring_errors
from gateway.errors import invalid
from gateway.requests.body import decode
from sluice.client import RouterLoras

LOAD_SECONDS = 60.0
"""Timeout for one router, which waits for its engines."""
PARAMS = {"lora_id": "lora_name", "path": "lora_path", "spec.lora_id": "lora_name"}


class LoadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str
    """Folder on the engines' machines."""
    lora_int_id: int | None = None
    """Ignored: an adapter's number is vLLM's own matter."""
    load_inplace: bool | None = None
    """Ignored: a loaded adapter of this name is always replaced, for later requests."""
    base_model_name: str | None = None
    is_3d_lora_weight: bool | None = None

    def check(self) -> None:
        """Raises ApiError."""
        for name in ("lora_name", "lora_path"):
            if not getattr(self, name):
                raise invalid("is empty", name)
        if self.is_3d_lora_weight:
            raise invalid("is not supported", "is_3d_lora_weight")


class UnloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None


async def load_lora_adapter(gateway: Gateway, exchange: Exchange) -> bytes:
    """Raises ApiError."""
    request = decode(exchange.body, LoadRequest).fields
    request.check()
    with ring_errors(PARAMS):
        routers = await gateway.client.load_lora(
            request.lora_name,
            path=request.lora_path,
            model=request.base_model_name or "",
            timeout=LOAD_SECONDS,
            metadata=exchange.caller.metadata,
        )
        return _answer(routers, request.lora_name, "added")


async def unload_lora_adapter(gateway: Gateway, exchange: Exchange) -> bytes:
    """Raises ApiError."""
    request = decode(exchange.body, UnloadRequest).fields
    with ring_errors(PARAMS):
        routers = await gateway.client.unload_lora(
            request.lora_name, timeout=LOAD_SECONDS, metadata=exchange.caller.metadata
        )
        return _answer(routers, request.lora_name, "removed")


def _answer(routers: Sequence[RouterLoras], name: str, what: str) -> bytes:
    """Raises the SluiceError of the first router that failed."""
    for router in routers:
        if router.error is not None:
            raise router.error
    return msgspec.json.encode({"message": f"Success: LoRA adapter '{name}' {what} successfully."})
