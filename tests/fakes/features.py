"""The router's optional features, in a ring whose adapters are known."""

from collections.abc import Mapping
from typing import Generic, TypeVar

from router.features import all_features
from router.parse.model import Limits, ServedModel
from router.requests.part import Feature
from sluice.wire.adapters import Adapter
from sluice.wire.tables import Table

T = TypeVar("T")


class Known(Generic[T]):
    """Adapters of one kind."""

    def __init__(self, adapters: Mapping[str, T]) -> None:
        self._adapters = adapters

    async def settle(self, adapter_id: str, tenant: str = "") -> None:
        pass

    def find(self, adapter_id: str, version: str = "") -> T | None:
        return self._adapters.get(adapter_id)


def make_features(
    model: ServedModel,
    limits: Limits,
    adapters: Mapping[str, Adapter] = {},
    prompt_adapters: Mapping[str, Table] = {},
) -> tuple[Feature, ...]:
    return all_features(model, limits, None, Known(adapters), Known(prompt_adapters), lora_in_requests=True)
