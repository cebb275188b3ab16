"""An OpenTelemetry collector: a gRPC server that stores the spans that it receives."""
# ruff: noqa: N802

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as pb
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as services
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass
class Collector(services.TraceServiceServicer):
    spans: list[Span] = field(default_factory=list)
    resources: list[dict[str, str]] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    open: threading.Event = field(default_factory=threading.Event)
    """While it is not set, export calls block."""
    address: str = ""

    def __post_init__(self) -> None:
        self.open.set()

    def Export(self, request: Any, context: Any) -> Any:
        self.metadata.append(dict(context.invocation_metadata()))
        self.open.wait()
        for batch in request.resource_spans:
            self.resources.append({pair.key: pair.value.string_value for pair in batch.resource.attributes})
            for scope in batch.scope_spans:
                self.spans += scope.spans
        return pb.ExportTraceServiceResponse()

    def tree(self, trace_id: str) -> dict[str, list[Span]]:
        """The spans of a trace by the hex id of their parent; "" for no parent."""
        children: dict[str, list[Span]] = {}
        for span in self.spans:
            if span.trace_id.hex() == trace_id:
                children.setdefault(span.parent_span_id.hex(), []).append(span)
        return children


@contextmanager
def collect() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(4))
    services.add_TraceServiceServicer_to_server(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        collector.open.set()
        server.stop(None).wait()


def attributes(span: Span) -> dict[str, Any]:
    """A span's attributes as Python values, lists as tuples."""

    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        content = getattr(value, kind)
        return tuple(plain(item) for item in content.values) if kind == "array_value" else content

    return {pair.key: plain(pair.value) for pair in span.attributes}
