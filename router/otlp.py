"""Traces as OpenTelemetry's spans, sent by OTLP over gRPC. Only this module imports OpenTelemetry's packages."""

import logging
import secrets
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from router.requests.trace import RequestTrace, Span
from sluice.telemetry.version import build_version

NANOSECONDS = 1_000_000_000


class OtlpSender:
    """Reads OpenTelemetry's own variables: headers, certificates and the limit of a call from OTEL_EXPORTER_OTLP_…,
    more attributes of the resource from OTEL_RESOURCE_ATTRIBUTES."""

    def __init__(self, endpoint: str, router: str) -> None:
        # It would write its own lines to stderr; the queue counts and logs what could not be sent.
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        version = build_version()
        about = {"service.name": "sluice-router", "service.version": version, "service.instance.id": router}
        self._resource = Resource.create(about)
        self._scope = InstrumentationScope("sluice.router", version)
        self._exporter = OTLPSpanExporter(endpoint=endpoint)

    def send(self, traces: Sequence[RequestTrace]) -> bool:
        spans = [span for trace in traces for span in self._spans(trace)]
        return self._exporter.export(spans) is SpanExportResult.SUCCESS

    def close(self) -> None:
        self._exporter.shutdown()

    def _spans(self, trace: RequestTrace) -> list[ReadableSpan]:
        caller = trace.context.parent_id
        parent = None if caller is None else _context(trace, caller, remote=True)
        events = [Event(event.name, event.attributes, _nanoseconds(event.time)) for event in trace.events]
        own = _context(trace)
        root = self._span(trace.request, own, parent, SpanKind.SERVER, events)
        return [root, *(self._span(child, _context(trace), own) for child in trace.children)]

    def _span(
        self,
        span: Span,
        own: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind = SpanKind.INTERNAL,
        events: Sequence[Event] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=own,
            parent=parent,
            resource=self._resource,
            attributes=span.attributes,
            events=events,
            kind=kind,
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(StatusCode.UNSET),
            start_time=_nanoseconds(span.start),
            end_time=_nanoseconds(span.end),
            instrumentation_scope=self._scope,
        )


def _context(trace: RequestTrace, span_id: int | None = None, remote: bool = False) -> SpanContext:
    """Of a new span, or of one whose id is known."""
    number = span_id or secrets.randbits(64) or 1
    return SpanContext(trace.context.trace_id, number, remote, TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
