"""Logits processors: only engines that have them run the request."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from router.errors import Violations
from router.parse.model import Limits
from router.peers.offers import Need, named_need
from router.requests.part import Part
from sluice.v1 import generation_pb2 as pb
from sluice.wire.params import SamplingParams

FIELD = "spec.sampling.logits_processors"


@dataclass(frozen=True)
class Processors:
    fields = frozenset({"sampling.logits_processors"})

    _limits: Limits

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_Processors | None":
        names = message.sampling.logits_processors
        if not bad.at_most(FIELD, len(names), self._limits.logits_processors, "names"):
            return None
        for i, name in enumerate(names):
            bad.at_most(f"{FIELD}[{i}]", len(name.encode()), self._limits.processor_name_bytes, "bytes")
        return _Processors(tuple(names))


@dataclass(frozen=True, slots=True)
class _Processors(Part):
    names: tuple[str, ...]

    def needs(self) -> Iterator[Need]:
        for i, name in enumerate(self.names):
            yield named_need("logits_processor", name, f"{FIELD}[{i}]", "logits processors")

    async def sampling(self, sampling: SamplingParams, _: str) -> SamplingParams:
        return msgspec.structs.replace(sampling, logits_processors=self.names)
