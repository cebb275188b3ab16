"""Logits processors: only engines that have them run the request. The names themselves are sampling parameters."""

from collections.abc import Iterator
from dataclasses import dataclass

from router.errors import Violations
from router.parse.needs import Need, named_need
from router.requests.part import Part
from sluice.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class Processors:
    fields = frozenset({"sampling.logits_processors"})

    async def parse(self, message: pb.GenerationSpec, _bad: Violations, _: str) -> "_Processors":
        return _Processors(tuple(message.sampling.logits_processors))


@dataclass(frozen=True, slots=True)
class _Processors(Part):
    names: tuple[str, ...]

    def needs(self) -> Iterator[Need]:
        for i, name in enumerate(self.names):
            yield named_need("logits_processor", name, f"spec.sampling.logits_processors[{i}]", "logits processors")
