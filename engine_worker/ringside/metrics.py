"""What an engine shows to Prometheus; docs/metrics.md lists it."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from engine_worker.core.stats import Stats
from engine_worker.ringside.mailbox import Mailbox
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.stats_callback import StatsCallback
from sluice.ring.inbox import Inbox
from sluice.ring.wire import ToEngine
from sluice.telemetry.metrics import counter, gauge, histogram
from sluice.telemetry.output import lines_lost

P = "sluice_engine_"


def requests(stats: Stats, mailbox: Mailbox) -> Iterator[Metric]:
    """Requests and their sequences."""
    latest, totals = stats.latest, stats.totals()
    yield counter(P + "requests", "Requests taken in.", totals.requests)
    yield counter(P + "requests_refused", "Requests refused, by error code.", mailbox.refused, ("code",))
    yield counter(P + "sequences_ended", "Sequences that ended, by finish reason.", totals.ended, ("reason",))
    yield gauge(P + "requests_active", "Requests that live in the engine.", latest.active_requests)
    yield gauge(P + "requests_limit", "Requests that it holds at most.", latest.max_requests)
    yield gauge(P + "sequences_queued", "Sequences that wait for memory.", latest.queued_requests)
    yield gauge(P + "sequences_paused", "Sequences that gave their memory back and wait.", latest.paused_requests)
    yield counter(P + "pauses", "How often a sequence gave its memory back for others.", totals.preemptions)


def steps(stats: Stats) -> Iterator[Metric]:
    """Steps and tokens."""
    latest, totals = stats.latest, stats.totals()
    running = {"context": latest.context_requests, "generation": latest.generation_requests}
    yield gauge(P + "sequences_scheduled", "Sequences in the latest step; none at rest.", running, ("phase",))
    text = "Static batching: tokens generated since the batch began."
    yield gauge(P + "static_batch_tokens", text, latest.total_generation_tokens)
    text = "Static batching: slots of ended sequences."
    yield gauge(P + "static_batch_empty_slots", text, latest.empty_generation_slots)
    yield histogram(P + "step_seconds", "Duration of a step.", stats.step_seconds)
    yield histogram(P + "step_sequences", "Sequences in a step.", stats.step_sequences)
    yield counter(P + "context_tokens", "Context tokens computed, after a pause again.", totals.context_tokens)
    yield counter(P + "generated_tokens", "Tokens generated.", totals.generated_tokens)
    yield gauge(P + "tokens_per_second", "Tokens generated, over the last second.", latest.tokens_per_second)
    yield counter(P + "prompt_tokens", "Prompt tokens of requests scheduled.", totals.prompt_tokens)
    yield counter(P + "cached_tokens", "Of those, served from the prefix cache.", totals.cached_tokens)
    ratio = latest.prefix_cache_hit_ratio
    yield gauge(P + "prefix_cache_hit_ratio", "Cached tokens over prompt tokens, since the start.", ratio)


def memory(stats: Stats) -> Iterator[Metric]:
    """The KV cache."""
    latest, totals = stats.latest, stats.totals()
    blocks = {
        ("device", "used"): latest.used_kv_blocks,
        ("device", "free"): latest.free_kv_blocks,
        ("host", "used"): latest.used_host_blocks,
        ("host", "free"): latest.max_host_blocks - latest.used_host_blocks,
    }
    text = "KV cache blocks; those of the device that are only cached count as free."
    yield gauge(P + "kv_blocks", text, blocks, ("tier", "state"))
    yield gauge(P + "kv_block_tokens", "Tokens in a block.", latest.tokens_per_kv_block)
    yield counter(P + "kv_evictions", "Cached blocks of the device that were taken for others.", totals.evictions)
    yield counter(P + "kv_offloads", "Of those, moved to the host.", totals.offloads)
    yield counter(P + "kv_onloads", "Blocks moved back to the device.", totals.onloads)


def ring(inbox: "Inbox[ToEngine]", mailbox: Mailbox, outbox: Outbox) -> Iterator[Metric]:
    """What went wrong on the way in and out."""
    text = "Messages without an answer, by reason."
    yield counter(P + "messages_dropped", text, mailbox.dropped, ("reason",))
    yield counter(P + "frames_malformed", "Frames dropped because they were none.", inbox.malformed)
    yield counter(P + "peers_refused", "Attempts to connect without a key that is admitted.", inbox.refused)
    yield counter(P + "frame_gaps", "Times that frames of a lane never came.", inbox.gaps)
    yield counter(P + "rows_lost", "Rows given up because a detokenizer did not take them.", outbox.lost)


def callback(found: StatsCallback | None) -> Iterator[Metric]:
    """The user's function for statistics."""
    errors, steps, requests = (found.errors, found.lost_steps, found.lost_requests) if found else (0, 0, 0)
    yield counter(P + "stats_callback_errors", "Exceptions of the stats_callback.", errors)
    yield counter(P + "stats_callback_steps_lost", "Steps that a slow stats_callback missed.", steps)
    yield counter(P + "stats_callback_requests_lost", "Reports of requests that it missed.", requests)


def log() -> Iterator[Metric]:
    """What the log lacks."""
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())
