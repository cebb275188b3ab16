"""`python -m gateway`: one HTTP gateway process."""

import os

from sluice.host.installation import require_extra
from sluice.host.process import die_with_parent, exit_on_signals, run_service

if __name__ == "__main__":
    # Before the imports below, which take a second.
    exit_on_signals()
    require_extra("gateway", "gateway")
    # gRPC reads this variable at import. Without the event engine, the thread that waits for events also reads the
    # sockets, so messages are not passed between threads. That saves about 10 µs per chunk.
    os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client")

import asyncio
import gc

import uvloop

from gateway.service import serve
from sluice.host.descriptors import OWN_DESCRIPTORS, check_limit, raise_limit
from sluice.host.output import protect_stderr
from sluice.host.ports import LISTENER_VARIABLE, check_ports
from sluice.settings.gateway import GatewaySettings
from sluice.settings.read import load_settings
from sluice.telemetry.logs import configure
from sluice.telemetry.server import MetricsPort


def main() -> None:
    """Serve until SIGTERM or SIGINT, then drain. Exits with an error message if the gateway cannot start."""
    protect_stderr()
    die_with_parent()
    settings = load_settings(GatewaySettings)
    log = configure("gateway", settings.log_level).bind(id=settings.id)
    check_limit(raise_limit(), OWN_DESCRIPTORS + settings.max_connections, log)
    try:
        # A launcher has opened the HTTP port already.
        opened = ("port",) if LISTENER_VARIABLE in os.environ else ()
        check_ports(port for port in settings.ports if port.setting not in opened)
        metrics_port = MetricsPort(settings)
        # Objects created so far are never freed. Without this, every full garbage collection would traverse them.
        gc.freeze()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(serve(settings, log, metrics_port))
    except (OSError, RuntimeError, ValueError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    run_service("gateway", main)
