"""grpc.health.v1: SERVING while the router can serve new requests; the service name "liveness" is always SERVING."""

import asyncio
from collections.abc import Iterable
from typing import Any, cast

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health_pb2 as pb

from router.api.rpc import Context

LIVENESS = "liveness"
READINESS = "readiness"
HEALTH = cast(ServiceDescriptor, pb.DESCRIPTOR.services_by_name["Health"])


# We do not use grpcio-health-checking's servicer: when its first watcher disconnects, all others get no more updates.
class HealthService:
    """One status for the server (""), each of its services and READINESS; LIVENESS is always SERVING."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset({"", LIVENESS, READINESS, *services})
        self._serving = False
        self._changed = asyncio.Event()
        self._watchers = 0

    @property
    def watched(self) -> bool:
        """Whether a client watches the health."""
        return self._watchers > 0

    def set(self, serving: bool) -> None:
        if serving != self._serving:
            self._serving = serving
            # Use a new event for the next change, so that each watcher sees this change exactly once.
            self._changed.set()
            self._changed = asyncio.Event()

    async def check(self, request: pb.HealthCheckRequest, context: Context) -> pb.HealthCheckResponse:
        if request.service not in self._services:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"the service {request.service!r} is unknown")
        return self._answer(request.service)

    async def watch(self, request: pb.HealthCheckRequest, context: Context) -> None:
        """The current status, then each change; SERVICE_UNKNOWN for an unknown service, as the protocol requires."""
        last = None
        self._watchers += 1
        try:
            while True:
                changed = self._changed
                answer = self._answer(request.service)
                if answer != last:
                    await context.write(answer)
                    last = answer
                await changed.wait()
        finally:
            self._watchers -= 1

    async def list(self, _: Any, context: Context) -> None:
        """Optional in the protocol, and not implemented."""
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "grpc.health.v1.Health.List is not implemented")

    def _answer(self, service: str) -> pb.HealthCheckResponse:
        if service not in self._services:
            return pb.HealthCheckResponse(status=pb.HealthCheckResponse.SERVICE_UNKNOWN)
        serving, not_serving = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
        return pb.HealthCheckResponse(status=serving if self._serving or service == LIVENESS else not_serving)
