"""Routers that serve the streams of `tests.fakes.story` over gRPC and break them as planned."""
# ruff: noqa: N802

import random
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.v1 import generation_pb2 as pb
from sluice.v1 import generation_pb2_grpc
from tests.fakes.failures import Failure
from tests.fakes.story import events

Break = Callable[[Any], None]


def with_reason(code: grpc.StatusCode, reason: str, retry_after: float | None = None, **metadata: str) -> Break:
    """An error from a router, with a reason."""
    details: list[Any] = [error_details_pb2.ErrorInfo(reason=reason, domain="sluice", metadata=metadata)]
    if retry_after is not None:
        details.append(error_details_pb2.RetryInfo(retry_delay=Duration(nanos=int(retry_after * 1e9))))
    return Failure(code, reason.lower(), tuple(details)).abort


def bare(code: grpc.StatusCode, message: str) -> Break:
    """An error from gRPC itself, without details."""
    return lambda context: context.abort(code, message)


GONE = bare(grpc.StatusCode.UNAVAILABLE, "Socket closed")


@dataclass
class Plan:
    """When and how calls break. Each call, on any router, uses up the next break; without one, it succeeds."""

    breaks: deque[tuple[int, Break | None]] = field(default_factory=deque)
    """Number of events before the break, and how the call then ends (None: without an error)."""
    seen: list[tuple[int, pb.GenerationSpec]] = field(default_factory=list)
    """The received calls: number of the router, and the request."""
    metadata: list[dict[str, Any]] = field(default_factory=list)


class BreakingRouter(generation_pb2_grpc.GenerationServiceServicer, health_pb2_grpc.HealthServicer):
    """The servicer of one router."""

    def __init__(self, number: int, plan: Plan) -> None:
        self._number = number
        self._plan = plan

    def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:
        self._plan.seen.append((self._number, request.spec))
        self._plan.metadata.append(dict(context.invocation_metadata()))
        after, end = self._plan.breaks.popleft() if self._plan.breaks else (-1, None)
        for count, event in enumerate(events(request.spec, random.Random(len(self._plan.seen)))):
            if count == after:
                if end is not None:
                    end(context)
                return
            yield event

    def Generate(self, request: Any, context: Any) -> Any:
        self._plan.seen.append((self._number, request.spec))
        if self._plan.breaks:
            _, end = self._plan.breaks.popleft()
            assert end is not None
            end(context)
        return pb.GenerateResponse(request_id="r", outputs=[pb.Output(text=f"served by {self._number}")])

    def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    def Abort(self, request: Any, context: Any) -> Any:
        return pb.AbortResponse(aborted=request.request_id == f"lives at {self._number}")


# Calls that no test needs answer UNIMPLEMENTED, as the generated base classes do.
BreakingRouter.__abstractmethods__ = frozenset()


@contextmanager
def run_router(
    number: int, plan: Plan, credentials: grpc.ServerCredentials | None = None
) -> Iterator[tuple[str, grpc.Server]]:
    """Run a router. Yields its address, and the server, which a test may stop."""
    server = grpc.server(ThreadPoolExecutor(8))
    servicer: Any = BreakingRouter(number, plan)
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    address = "127.0.0.1:0"
    port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
    server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        server.stop(None).wait()


@contextmanager
def run_routers(count: int, plan: Plan) -> Iterator[list[str]]:
    """Run `count` routers. Yields their addresses."""
    with ExitStack() as stack:
        yield [stack.enter_context(run_router(number, plan))[0] for number in range(count)]
