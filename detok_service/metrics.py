"""What a detokenizer shows to Prometheus; docs/metrics.md lists it. Called from the thread of a scrape."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from detok_service.service import Service
from sluice.ring.inbox import Inbox
from sluice.ring.wire import ToDetokenizer
from sluice.telemetry.metrics import counter, gauge
from sluice.telemetry.output import lines_lost

P = "sluice_detok_"


def read(service: Service, inbox: "Inbox[ToDetokenizer]") -> Iterator[Metric]:
    """All of it."""
    yield gauge(P + "streams", "Sequences that live.", service.streams)
    yield gauge(P + "streams_limit", "Sequences that may.", service.max_streams)
    yield counter(P + "tokens", "Tokens received.", service.intake.tokens)
    yield gauge(P + "queue_messages", "Messages found at the latest look into the inbox.", service.backlog)
    yield gauge(P + "queue_rows", "Rows that full lanes hold up.", service.waiting)
    yield counter(
        P + "streams_failed", "Streams ended with an error here, by code.", service.decoding.failed, ("code",)
    )
    yield counter(P + "rows_unknown", "Rows of streams that never began here.", service.intake.unknown_rows)
    yield counter(P + "streams_dropped", "Streams whose attempt was given up by its router.", service.decoding.dropped)
    yield counter(P + "opens_stale", "Streams that began after a later attempt had.", service.intake.stale_opens)
    yield counter(P + "frame_gaps", "Times that frames of a lane never came.", service.gaps)
    yield counter(P + "frames_malformed", "Frames dropped because they were none.", inbox.malformed)
    yield counter(P + "peers_refused", "Attempts to connect without a key that is admitted.", inbox.refused)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())
    yield gauge(P + "draining", "1 if it asks for no new streams.", float(service.draining_since is not None))
