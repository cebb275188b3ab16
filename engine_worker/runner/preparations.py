"""Prepares requests: compiles guides, loads LoRA adapters and computes the rows of images before the first step."""

from collections.abc import Callable, Sequence

from engine_worker.guided.guides import refused_guide
from engine_worker.guided.masks import GuidedSequence
from engine_worker.protocol import Preparation
from engine_worker.runner.extensions import Extensions
from engine_worker.sampling.logit_rules import LogitRules, build_logit_rules
from engine_worker.sampling.processors import Processing
from sluice.wire.errors import Fault
from sluice.wire.params import Guide
from sluice.wire.requests import Extras, Submit


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

    def prepare(self, submit: Submit, extras: Extras, *, running: bool = False) -> Preparation | None:
        guide = None if extras.guide is None else self._prepare_guide(submit, extras.guide, running=running)
        if running:
            # Adapters and image rows of a running request are already there.
            return guide
        parts = [guide]
        if extras.adapter is not None and self._adapters is not None:
            parts.append(self._adapters.prepare(extras.adapter))
        if extras.tables is not None and extras.tables.images and self._images is not None:
            parts.append(self._images.prepare(extras.tables.images))
        needed = [part for part in parts if part is not None]
        return Preparations(needed, self._advance) if needed else None

    def logit_rules(self, submit: Submit, guide: Guide | None) -> list[LogitRules | None]:
        guided: list[GuidedSequence] = []
        if guide is not None and self._guides is not None:
            ends = submit.stopping.eos_token_ids + submit.stopping.stop_token_ids
            guided = self._guides.sequences(guide, ends, submit.n)
        return build_logit_rules(submit.sampling, submit.prompt, Processing.of(submit), self._vocab_size, guided)

    def _prepare_guide(self, submit: Submit, guide: Guide, *, running: bool) -> Preparation | None:
        if self._guides is None:
            return refused_guide(guide)
        recovered = running or bool(submit.attempt or submit.resume)
        return self._guides.prepare(guide, tenant=submit.tenant, recovered=recovered)

    def _advance(self) -> None:
        """Poll every kind of preparation once."""
        for part in (self._guides, self._adapters, self._images):
            if part is not None:
                part.advance()
