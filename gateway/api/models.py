"""/v1/models: the served model, and the LoRA adapters that a request may name instead."""

from typing import Any

import msgspec

from gateway.api.endpoint import Exchange
from gateway.api.gateway import Gateway, ring_errors
from gateway.errors import ApiError

ADAPTERS_SECONDS = 2.0
"""Timeout for one router. Routers that do not answer in time are ignored: all routers know the same adapters."""


class ModelCard(msgspec.Struct):
    id: str
    max_model_len: int
    parent: str | None = None
    """For an adapter: the id of its model."""
    default_sampling: dict[str, float] | None = None
    """Values of what requests leave unset. None for an adapter: those of its model."""
    object: str = "model"
    created: int = 0
    owned_by: str = "sluice"


async def list_models(gateway: Gateway, exchange: Exchange) -> bytes:
    return msgspec.json.encode({"object": "list", "data": await _models(gateway, exchange)})


async def get_model(gateway: Gateway, exchange: Exchange) -> bytes:
    """Raises ApiError."""
    name = exchange.path_params["model"]
    for model in await _models(gateway, exchange):
        if model.id == name:
            return msgspec.json.encode(model)
    message = f"the model {name[:64]!r} is not served"
    raise ApiError(404, message, "not_found_error", param="model", code="model_not_found")


async def _models(gateway: Gateway, exchange: Exchange) -> list[ModelCard]:
    with ring_errors():
        metadata = exchange.caller.metadata
        served = await gateway.client.models(metadata=metadata)
        routers = await gateway.client.list_loras(timeout=ADAPTERS_SECONDS, metadata=metadata)
    models = [
        ModelCard(model.name, model.max_context_tokens, default_sampling=_values(model.default_sampling))
        for model in served
    ]
    adapters = sorted({lora.lora_id for router in routers for lora in router.loras})
    return [*models, *(ModelCard(name, models[0].max_model_len, models[0].id) for name in adapters if models)]


def _values(sampling: Any) -> dict[str, float]:
    """The fields of a sluice.v1.SamplingParams that are set. A float32 is written in as few digits as identify it."""
    return {
        field.name: value if field.type == field.TYPE_UINT32 else float(f"{value:.7g}")
        for field, value in sampling.ListFields()
    }
