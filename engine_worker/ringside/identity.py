"""An engine's description of itself: for routers in its heartbeats, for operators in its log and at /status.json."""

from dataclasses import dataclass
from hashlib import blake2b

import msgspec

from engine_worker.core.refusals import EngineLimits, longest_sequence
from engine_worker.protocol import Runner
from engine_worker.step import LOGITS
from sluice.checkpoint.folder import Checkpoint
from sluice.host.installation import BUILD_VERSION
from sluice.settings.services import EngineSettings
from sluice.telemetry.status_report import EngineReport, ServiceReport
from sluice.wire.heartbeats import EngineHeartbeat
from sluice.wire.stats import StepStats


@dataclass(frozen=True)
class Identity:
    """Properties that do not change during the life of the process."""

    settings: EngineSettings
    limits: EngineLimits
    address: str
    epoch: int
    tokenizer: str
    """Fingerprint of the tokenizer files."""
    version: str = BUILD_VERSION
    kv_group: str = ""
    kv_keeper: str = ""
    kv_layout: str = ""
    """See `EngineHeartbeat`."""

    def sizes(self, stats: StepStats) -> dict[str, int]:
        """The engine's limits, for the log."""
        return {
            "kv_blocks": stats.max_kv_blocks,
            "kv_tokens": stats.max_kv_blocks * stats.tokens_per_kv_block,
            "max_sequence_tokens": self.limits.max_sequence_tokens,
            "max_batch_size": self.settings.max_batch_size,
            "max_tokens_per_step": self.settings.max_tokens_per_step,
            "max_requests": self.limits.max_requests,
        }

    def heartbeat(self, stats: StepStats, draining: bool) -> EngineHeartbeat:
        """A heartbeat with these statistics; all other fields that change have their defaults."""
        settings, limits = self.settings, self.limits
        return EngineHeartbeat(
            engine=settings.id,
            epoch=self.epoch,
            address=self.address,
            fingerprint=limits.fingerprint,
            max_sequence_tokens=limits.max_sequence_tokens,
            draining=draining,
            stats=stats,
            tokenizer=self.tokenizer,
            max_batch_size=settings.max_batch_size,
            model_version=settings.model_version,
            offers=limits.offers,
            version=self.version,
            kv_group=self.kv_group,
            kv_keeper=self.kv_keeper,
            kv_layout=self.kv_layout,
            phase=settings.phase,
        )

    def report(self, stats: StepStats, draining: bool) -> ServiceReport:
        """The service's entry in /status.json."""
        engine = EngineReport(
            id=self.settings.id,
            state="draining" if draining else "serving",
            address=self.address,
            version=self.version,
            model=self.limits.fingerprint,
            model_version=self.settings.model_version,
            phase=self.settings.phase,
            max_batch_size=self.settings.max_batch_size,
        )
        return ServiceReport(self.address, engines=[engine.with_stats(stats)])


def fingerprint(checkpoint: Checkpoint, weights: str, dtype: str, max_attention_window: tuple[int, ...]) -> str:
    """Identifies the model as this engine computes it, in hex. A stream may continue on any engine with the same
    fingerprint."""
    # Without device, attention backend, number of ranks and batch size, which only change the rounding: a stream may
    # move from a GPU to a CPU.
    parts = (checkpoint.fingerprint, weights, dtype, max_attention_window)
    return blake2b(msgspec.msgpack.encode(parts), digest_size=8, person=b"sluice-model").hexdigest()


def limits_of(settings: EngineSettings, checkpoint: Checkpoint, runner: Runner) -> EngineLimits:
    """The limits and features that this engine announces and checks requests against."""
    context = settings.max_context_tokens or checkpoint.max_context_tokens
    return EngineLimits(
        fingerprint=fingerprint(checkpoint, settings.weights, runner.dtype, settings.max_attention_window),
        vocab_size=checkpoint.vocab_size,
        max_sequence_tokens=longest_sequence(runner, settings, context),
        max_requests=settings.max_requests,
        processors=frozenset(settings.processor_names),
        tensors=frozenset(runner.tensors) - {LOGITS},
        max_draft_tokens=settings.draft_tokens,
        has_adapters=runner.adapters is not None,
        hidden_size=runner.hidden_size,
        image_rows=runner.image_rows,
    )


def why_context_is_limited(settings: EngineSettings, checkpoint: Checkpoint, limits: EngineLimits) -> str | None:
    """The reason why a sequence may have fewer tokens than the model's context, or than `max_context_tokens`, with the
    setting to raise; None if it may have as many."""
    context = settings.max_context_tokens or checkpoint.max_context_tokens
    limit = limits.max_sequence_tokens
    if limit >= context:
        return None
    setting = "kv_memory_fraction" if settings.kv_cache_tokens is None else "kv_cache_tokens"
    return (
        f"the KV cache holds {limit} tokens, fewer than the context of {context}: longer requests are refused; "
        f"raise {setting} to allow them"
    )
