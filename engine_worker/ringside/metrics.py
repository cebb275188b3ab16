"""The engine's Prometheus metrics, listed in docs/metrics.md."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from engine_worker.core.engine import Engine
from engine_worker.kvcache.fetches import FETCH_SECONDS
from engine_worker.protocol import ImageUsage
from engine_worker.ringside.mailbox import Mailbox
from engine_worker.ringside.outbox import Outbox
from engine_worker.ringside.stats_log import StatsCallback
from sluice.host.output import lines_lost
from sluice.lanes.inbox import Inbox
from sluice.telemetry.measures import Histogram
from sluice.telemetry.metrics import counter, gauge, histogram
from sluice.telemetry.probes import Startup
from sluice.wire.requests import ToEngine

P = "sluice_engine_"


def start(startup: Startup) -> Iterator[Metric]:
    """Metrics that are available while the model is being loaded."""
    yield gauge(P + "loading_ratio", "Fraction of the weights loaded so far; 1 when ready.", startup.loaded)


def read(
    engine: Engine,
    images: ImageUsage | None,
    inbox: "Inbox[ToEngine]",
    mailbox: Mailbox,
    outbox: Outbox,
    stats_callback: StatsCallback | None,
) -> Iterator[Metric]:
    """All other metrics. Called in the thread of the scrape."""
    yield from requests(engine, mailbox)
    yield from steps(engine)
    yield from memory(engine)
    yield from pool_file(engine)
    yield from lora(engine)
    yield from image_rows(images)
    yield from ring(inbox, mailbox, outbox)
    yield from callback(stats_callback)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())


def requests(engine: Engine, mailbox: Mailbox) -> Iterator[Metric]:
    latest, live = engine.stats.latest, engine.live
    yield counter(P + "requests", "Requests accepted.", live.num_begun)
    yield counter(P + "requests_refused", "Requests refused, by error code.", mailbox.refused, ("code",))
    yield counter(P + "sequences_ended", "Sequences that ended, by finish reason.", live.ended, ("reason",))
    yield gauge(P + "requests_active", "Live requests.", latest.active_requests)
    yield gauge(P + "requests_limit", "Maximum number of live requests.", latest.max_requests)
    yield gauge(P + "sequences_queued", "Sequences waiting for memory.", latest.queued_requests)
    yield gauge(P + "sequences_paused", "Preempted sequences waiting for memory.", latest.paused_requests)
    yield counter(P + "pauses", "Preemptions of sequences.", engine.cache.preemptions)


def steps(engine: Engine) -> Iterator[Metric]:
    stats, cache = engine.stats, engine.cache
    latest = stats.latest
    running = {"context": latest.context_requests, "generation": latest.generation_requests}
    yield gauge(P + "sequences_scheduled", "Sequences in the latest step; 0 while idle.", running, ("phase",))
    text = "Static batching: tokens generated since the batch began."
    yield gauge(P + "static_batch_tokens", text, latest.total_generation_tokens)
    slots = latest.empty_generation_slots
    yield gauge(P + "static_batch_empty_slots", "Static batching: empty slots, whose sequences have ended.", slots)
    yield histogram(P + "step_seconds", "Duration of a step.", stats.step_seconds)
    yield histogram(P + "step_sequences", "Sequences in a step.", stats.step_sequences)
    yield counter(P + "context_tokens", "Context tokens computed, including recomputed ones.", stats.context_tokens)
    yield counter(P + "generated_tokens", "Tokens generated.", stats.generated_tokens)
    yield counter(P + "draft_tokens", "Draft tokens verified.", stats.draft_tokens)
    yield counter(P + "accepted_draft_tokens", "Draft tokens accepted.", stats.accepted_draft_tokens)
    yield gauge(P + "tokens_per_second", "Tokens generated per second, over the last second.", latest.tokens_per_second)
    yield counter(P + "prompt_tokens", "Prompt tokens of scheduled requests.", cache.prompt_tokens)
    yield counter(P + "cached_tokens", "Prompt tokens served from the prefix cache.", cache.cached_tokens)
    yield gauge(P + "prefix_cache_hit_ratio", "Ratio of cached to prompt tokens since the start.", cache.hit_ratio)


def memory(engine: Engine) -> Iterator[Metric]:
    latest, tiers = engine.stats.latest, engine.cache.tiers
    blocks = {
        ("device", "used"): latest.used_kv_blocks,
        ("device", "free"): latest.free_kv_blocks,
        ("host", "used"): latest.used_host_blocks,
        ("host", "free"): latest.max_host_blocks - latest.used_host_blocks,
    }
    text = "KV cache blocks; device blocks that only hold cached prefixes count as free."
    yield gauge(P + "kv_blocks", text, blocks, ("tier", "state"))
    yield gauge(P + "kv_block_tokens", "Tokens per KV cache block.", latest.tokens_per_kv_block)
    yield counter(P + "kv_evictions", "Cached device blocks evicted to make room for new content.", tiers.evictions)
    yield counter(P + "kv_offloads", "Evicted blocks moved to host memory.", tiers.offloads)
    yield counter(P + "kv_onloads", "Blocks moved from host memory back to the device.", tiers.onloads)


def pool_file(engine: Engine) -> Iterator[Metric]:
    """Metrics without values if the memory of the KV cache is private."""
    tiers, fetches, file = engine.cache.tiers, engine.cache.fetches, engine.cache.tiers.file
    text = "KV blocks taken over at the start, which another engine had computed."
    yield counter(P + "kv_adopted_blocks", text, {} if file is None else tiers.adopted)
    fetched = {} if fetches is None else fetches.sources
    yield counter(
        P + "kv_fetched_blocks",
        "KV blocks copied from other engines of this machine, or from keepers.",
        fetched,
        ("source",),
    )
    refused = {} if fetches is None else fetches.refused
    text = "KV blocks not copied: no longer there or not whole (missing), no memory, or computed faster (slow)."
    yield counter(P + "kv_fetch_refused_blocks", text, refused, ("reason",))
    failed = {} if fetches is None else fetches.keeper_failures
    text = "Questions for KV blocks that keepers did not answer, or not as they should."
    yield counter(P + "kv_keeper_failures", text, failed, ("reason",))
    text = "Time for which a request waited for its KV blocks."
    yield histogram(P + "kv_fetch_seconds", text, Histogram(FETCH_SECONDS) if fetches is None else fetches.seconds)
    text = "Full KV blocks copied to the host pool's file before they were evicted from the device."
    yield counter(P + "kv_saved_blocks", text, {} if file is None else tiers.saves)
    text = "Memory of the KV cache's file, by the pool whose blocks it has."
    size = {} if file is None else {"host" if file.layout.on_host else "device": file.used_bytes}
    yield gauge(P + "kv_file_bytes", text, size, ("tier",))


def lora(engine: Engine) -> Iterator[Metric]:
    """Metrics without values if the engine serves no adapters."""
    pages = engine.cache.adapters
    loads, adapters, evictions, host_bytes, by_state = ({} for _ in range(5))
    if pages is not None:
        host, free, available = pages.host.usage, pages.num_free, pages.available
        loads = {"LOADED": 0, **host.loads}
        adapters = {"host": host.adapters, "device": len(pages)}
        evictions = {"host": host.evictions, "device": pages.evictions}
        host_bytes = {"used": host.used_bytes, "free": host.max_bytes - host.used_bytes}
        by_state = {"used": pages.num_pages - available, "cached": available - free, "free": free}
    text = "Loads of LoRA adapters from their files, by outcome: LOADED or an error code."
    yield counter(P + "lora_loads", text, loads, ("outcome",))
    yield gauge(P + "lora_adapters", "LoRA adapters in memory.", adapters, ("tier",))
    yield counter(P + "lora_evictions", "LoRA adapters evicted to make room for others.", evictions, ("tier",))
    yield gauge(P + "lora_host_bytes", "Host memory for LoRA adapters.", host_bytes, ("state",))
    text = "Device pages for LoRA adapters; cached: of adapters that no sequence uses."
    yield gauge(P + "lora_pages", text, by_state, ("state",))


def image_rows(usage: ImageUsage | None) -> Iterator[Metric]:
    """Metrics without values if the model accepts no images."""
    counts = usage or ImageUsage(0, 0, 0, 0, {})
    size = {"used": counts.used_bytes, "free": max(0, counts.max_bytes - counts.used_bytes)}
    text = "Images of requests, by whether their rows were in memory (recomputed: evicted before a step used them)."
    yield counter(P + "image_lookups", text, counts.lookups, ("outcome",))
    yield gauge(P + "images", "Images whose rows are in memory.", counts.images)
    yield counter(P + "image_evictions", "Images whose rows were evicted to make room for others.", counts.evictions)
    yield gauge(P + "image_bytes", "Host memory for the rows of images.", {} if usage is None else size, ("state",))


def ring(inbox: "Inbox[ToEngine]", mailbox: Mailbox, outbox: Outbox) -> Iterator[Metric]:
    dropped = mailbox.dropped
    yield counter(P + "messages_dropped", "Messages dropped without a response, by reason.", dropped, ("reason",))
    yield counter(P + "frames_malformed", "Malformed frames dropped.", inbox.malformed)
    yield counter(P + "peers_refused", "Connections refused because their key is not admitted.", inbox.refused)
    yield counter(P + "frame_gaps", "Gaps in the frame numbers of a lane: frames were lost.", inbox.gaps)
    yield counter(P + "rows_lost", "Rows dropped because a detokenizer did not accept them.", outbox.lost)


def callback(thread: StatsCallback | None) -> Iterator[Metric]:
    errors, steps, requests = (thread.errors, thread.lost_steps, thread.lost_requests) if thread else (0, 0, 0)
    yield counter(P + "stats_callback_errors", "Exceptions raised by the stats_callback.", errors)
    yield counter(P + "stats_callback_steps_lost", "Step reports dropped because stats_callback was slow.", steps)
    yield counter(
        P + "stats_callback_requests_lost", "Request reports dropped because stats_callback was slow.", requests
    )
