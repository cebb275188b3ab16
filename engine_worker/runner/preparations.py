"""Prepares requests: compiles guides, loads LoRA adapters and computes the rows of images before the first step."""

from collections.abc import Callable, Sequence

from engine_worker.guided.guides import refused_guide
from engine_worker.guided.masks import GuidedSequence
from engine_worker.protocol import Preparation
from engine_worker.runner.extensions import Extensions
from engine_worker.sampling.logit_rules import LogitRules, build_logit_rules
from engine_worker.sampling.processors import Processing
from sluice.wire.errors import Fault
from sluice.wire.requests import Submit


class Preparations:
    """All preparations of one request as one; see `engine_worker.protocol.Preparation`."""

    def __init__(self, parts: Sequence[Preparation], advance: Callable[[], None]) -> None:
        """`advance`: updates all preparations of every kind."""
        self._parts = parts
        self._advance = advance

    @property
    def done(self) -> bool:
        return all(part.done for part in self._parts)

    @property
    def fault(self) -> Fault | None:
        return next((part.fault for part in self._parts if part.fault is not None), None)

    def poll(self) -> bool:
        self._advance()
        return self.done

    def withdraw(self) -> None:
        for part in self._parts:
            if not part.done:
                part.withdraw()


class RequestPreparer:
    """Implements `Runner.prepare` and `Runner.logit_rules`."""

    def __init__(self, extensions: Extensions, vocab_size: int) -> None:
        self._guides = extensions.guides
        self._adapters = extensions.adapters
        self._images = extensions.images
        self._vocab_size = vocab_size

    def prepare(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        if running:
            # Adapters and image rows of a running request are already there.
            return self._prepare_guide(spec, running=True)
        parts = [self._prepare_guide(spec)]
        if spec.adapter is not None and self._adapters is not None:
            parts.append(self._adapters.prepare(spec.adapter))
        if spec.tables is not None and spec.tables.images and self._images is not None:
            parts.append(self._images.prepare(spec.tables.images))
        needed = [part for part in parts if part is not None]
        return Preparations(needed, self._advance) if needed else None

    def logit_rules(self, spec: Submit) -> list[LogitRules | None]:
        guided: list[GuidedSequence] = []
        if spec.guide is not None and self._guides is not None:
            ends = spec.stopping.eos_token_ids + spec.stopping.stop_token_ids
            guided = self._guides.sequences(spec.guide, ends, spec.n)
        return build_logit_rules(spec.sampling, spec.prompt, Processing.of(spec), self._vocab_size, guided)

    def _prepare_guide(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        if spec.guide is None:
            return None
        if self._guides is None:
            return refused_guide(spec.guide)
        recovered = running or bool(spec.attempt or spec.resume)
        return self._guides.prepare(spec.guide, tenant=spec.tenant, recovered=recovered)

    def _advance(self) -> None:
        """Poll every kind of preparation once."""
        for part in (self._guides, self._adapters, self._images):
            if part is not None:
                part.advance()
