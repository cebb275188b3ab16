"""`python -m detok_service`: one detokenizer process."""

from sluice.host.installation import require_extra
from sluice.host.process import die_with_parent, exit_on_signals, on_stop_signal, run_service

if __name__ == "__main__":
    # Before the imports below, which take a second.
    exit_on_signals()
    require_extra("detok_service", "detok")

import gc
import secrets
import time
from functools import partial
from typing import Any

import msgspec
import structlog
import zmq

from detok_service import metrics
from detok_service.decoders import TokenizerError, load_decoders
from detok_service.router_links import MAX_LINKS
from detok_service.service import Detokenizer, Identity
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.host.descriptors import OWN_DESCRIPTORS, WATCHED_LANE_DESCRIPTORS, check_limit, raise_limit
from sluice.host.host_names import HostNames
from sluice.host.installation import BUILD_VERSION
from sluice.host.output import protect_stderr
from sluice.host.ports import PortError, check_ports
from sluice.host.socket_file import ListenError
from sluice.lanes.inbox import Inbox
from sluice.lanes.keys import InsecureError, KeysError
from sluice.lanes.lane import Lane
from sluice.settings.read import changed_settings, load_settings
from sluice.settings.services import DetokenizerSettings
from sluice.telemetry.logs import configure
from sluice.telemetry.server import MAX_CONNECTIONS, MetricsPort
from sluice.telemetry.service_status import ProgressBeacon, ServiceStatus, StatusFile
from sluice.telemetry.status_report import DetokenizerReport, ServiceReport
from sluice.wire.requests import SENDER, ToDetokenizer

# Longest poll of the inbox while idle. A signal handler runs during the poll but does not end it, so this bounds how
# late the main loop notices SIGTERM.
IDLE_SECONDS = 0.1
# Longest poll while a lane is full or the service is draining: ZeroMQ does not wake us when a lane has room again.
BUSY_SECONDS = 0.01
LINGER_SECONDS = 1.0
"""Time to send what the lanes still hold at shutdown."""
NEEDED_DESCRIPTORS = OWN_DESCRIPTORS + MAX_CONNECTIONS + MAX_LINKS * WATCHED_LANE_DESCRIPTORS
MAX_MESSAGES = 256
"""Messages handled per iteration of the main loop."""


def main() -> None:
    """Serve until SIGTERM or SIGINT, then drain. Exit status 0 after a drain, 1 when it cannot start."""
    protect_stderr()
    die_with_parent()
    settings = load_settings(DetokenizerSettings)
    log = configure("detok_service", settings.log_level).bind(id=settings.id)
    check_limit(raise_limit(), NEEDED_DESCRIPTORS, log)
    try:
        check_ports(settings.ports)
        metrics_port = MetricsPort(settings)
        checkpoint = open_checkpoint(settings.model, settings.name, revision=settings.revision, weights=False)
        decoders = load_decoders(checkpoint.tokenizer_file)
    except (CheckpointError, PortError, TokenizerError) as error:
        raise SystemExit(str(error)) from error
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        security = settings.security
        messages: Any = ToDetokenizer
        inbox: Inbox[ToDetokenizer] = Inbox(context, settings.listen, messages, security=security, senders=SENDER)
    except (KeysError, InsecureError, ListenError) as error:
        raise SystemExit(str(error)) from error
    address = settings.address(inbox.address)
    identity = Identity(settings.id, secrets.randbits(63), address, checkpoint.tokenizer_fingerprint, BUILD_VERSION)
    open_lane = partial(Lane, context, security=security.to("router"), watched=True, names=HostNames())
    service = Detokenizer(identity, decoders, open_lane, settings.max_streams, log)
    status_file = StatusFile()
    beacon = ProgressBeacon(status_file=status_file)
    metrics_port.show(
        beacon, partial(metrics.read, service, inbox), partial(unready, service), partial(report, service)
    )
    on_stop_signal(service.drain)
    # The token tables are never freed. Without this, every full garbage collection would traverse them.
    gc.freeze()
    changed = changed_settings(settings)
    log.info("ready", address=address, model=checkpoint.name, decoder=decoders.kind, settings=changed)
    serve(service, inbox, settings, beacon, status_file, log)
    metrics_port.close()
    inbox.close()
    context.term()


def serve(
    service: Detokenizer,
    inbox: "Inbox[ToDetokenizer]",
    settings: DetokenizerSettings,
    beacon: ProgressBeacon,
    status_file: StatusFile,
    log: structlog.stdlib.BoundLogger,
) -> None:
    status = ServiceStatus("ready", service.identity.address, service.identity.epoch)
    status_file.report(status)
    last_read_at = time.monotonic()
    while not service.drained(settings.drain_timeout):
        # Messages already in the inbox may have arrived as early as the last read of the inbox.
        arrived = last_read_at if inbox.waiting else None
        inbox.wait(wait_seconds(service))
        last_read_at = time.monotonic()
        messages = inbox.receive(MAX_MESSAGES)
        service.handle(messages, arrived)
        service.tick()
        # A full read means a backlog. A backlog that persists makes the service unready.
        beacon.touch(progressed=len(messages) < MAX_MESSAGES)
        if service.draining_since is not None and status.state == "ready":
            status = msgspec.structs.replace(status, state="draining")
            status_file.report(status)
            log.info("draining", streams=service.streams)
    service.close(LINGER_SECONDS)
    log.info("stopped", unknown_rows=service.decode_loop.unknown_rows, gaps=inbox.gaps, malformed=inbox.malformed)


def unready(service: Detokenizer) -> str | None:
    """Why the detokenizer accepts no new streams; None if it does accept them."""
    return "it is draining" if service.draining_since is not None else None


def report(service: Detokenizer) -> ServiceReport:
    """The content of /status.json."""
    identity = service.identity
    detokenizer = DetokenizerReport(
        id=identity.name,
        state="serving" if service.draining_since is None else "draining",
        address=identity.address,
        version=identity.version,
        streams=service.streams,
        queue_depth=service.backlog + service.waiting,
        tokens_per_second=service.tokens_per_second,
    )
    return ServiceReport(identity.address, detokenizers=[detokenizer])


def wait_seconds(service: Detokenizer) -> float:
    """How long the next poll of the inbox may block."""
    # Resumed tokens are pending work, whether or not a message arrives.
    if service.decode_loop.replaying:
        return 0.0
    busy = service.waiting or service.draining_since is not None
    return max(0.0, min(service.heartbeat_at - time.monotonic(), BUSY_SECONDS if busy else IDLE_SECONDS))


if __name__ == "__main__":
    run_service("detok_service", main)
