"""Sends traces as OpenTelemetry spans, by OTLP over gRPC. Only this module imports OpenTelemetry's packages."""

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
from sluice.host.installation import BUILD_VERSION

NANOSECONDS = 1_000_000_000


class OtlpSender:
    """Respects OpenTelemetry's environment variables: OTEL_EXPORTER_OTLP_… for headers, certificates and timeout,
    OTEL_RESOURCE_ATTRIBUTES for more resource attributes."""

    def __init__(self, endpoint: str, router: str) -> None:
        # Keep OpenTelemetry from writing to stderr; the queue counts and logs spans that could not be sent.
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
        attributes = {"service.name": "sluice-router", "service.version": BUILD_VERSION, "service.instance.id": router}
        self._resource = Resource.create(attributes)
        self._scope = InstrumentationScope("sluice.router", BUILD_VERSION)
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
        root_context = _context(trace)
        root = self._span(trace.request, root_context, parent, SpanKind.SERVER, events)
        return [root, *(self._span(child, _context(trace), root_context) for child in trace.children)]

    def _span(
        self,
        span: Span,
        context: SpanContext,
        parent: SpanContext | None,
        kind: SpanKind = SpanKind.INTERNAL,
        events: Sequence[Event] = (),
    ) -> ReadableSpan:
        return ReadableSpan(
            span.name,
            context=context,
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
    """The context of the span `span_id`, or of a new span."""
    number = span_id or secrets.randbits(64) or 1
    return SpanContext(trace.context.trace_id, number, remote, TraceFlags(TraceFlags.SAMPLED))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * NANOSECONDS)
