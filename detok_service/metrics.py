"""Prometheus metrics of a detokenizer; docs/metrics.md lists them. `read` is called in the thread of the scrape."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric

from detok_service.service import Detokenizer
from sluice.host.output import lines_lost
from sluice.lanes.inbox import Inbox
from sluice.telemetry.metrics import counter, gauge, histogram
from sluice.wire.requests import ToDetokenizer

P = "sluice_detok_"


def read(service: Detokenizer, inbox: "Inbox[ToDetokenizer]") -> Iterator[Metric]:
    loop = service.decode_loop
    yield gauge(P + "streams", "Live sequences.", service.streams)
    yield gauge(P + "streams_limit", "Maximum number of live sequences.", service.max_streams)
    yield counter(P + "tokens", "Tokens received.", loop.tokens)
    yield gauge(P + "queue_messages", "Messages in the latest read of the inbox.", service.backlog)
    yield gauge(P + "queue_rows", "Rows waiting because lanes are full.", service.waiting)
    text = "Time from a row's arrival until its text is passed to the lane."
    yield histogram(P + "delay_seconds", text, service.delay)
    yield counter(P + "streams_failed", "Streams that the detokenizer failed, by error code.", loop.failed, ("code",))
    yield counter(P + "rows_unknown", "Rows of streams that did not begin at this detokenizer.", loop.unknown_rows)
    yield counter(P + "streams_dropped", "Streams dropped because the router abandoned their attempt.", loop.dropped)
    yield counter(P + "opens_stale", "Streams that began after their attempt was abandoned.", loop.stale_opens)
    yield counter(P + "frame_gaps", "Gaps in the frame numbers of a lane: frames were lost.", inbox.gaps)
    yield counter(P + "frames_malformed", "Malformed frames dropped.", inbox.malformed)
    yield counter(P + "peers_refused", "Connections refused because their key is not admitted.", inbox.refused)
    yield counter(P + "log_lines_lost", "Log lines that could not be written.", lines_lost())
    yield gauge(P + "draining", "1 while draining.", float(service.draining_since is not None))
