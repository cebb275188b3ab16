"""`sluice serve`: a whole ring on this machine."""

import shutil
import signal
import sys
import threading
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Self

import typer

from sluice.cli.common import describe, with_options
from sluice.cli.detach import serve_detached
from sluice.cli.generate import print_stream
from sluice.cli.serve_options import ARGUMENTS, DEFAULT_PORT, ServeOptions
from sluice.client import Cancelled, Client, SluiceError
from sluice.launch import DEMO_REQUEST, Display, OptionsError, Ring, RingError
from sluice.launch.logs import lines_lost
from sluice.ring.checkpoint import CheckpointError
from sluice.ring.process import INTERRUPTED, START_FAILED
from sluice.settings.read import ALL
from sluice.telemetry.output import protect_stderr, protect_stdout

EXAMPLE = "def fibonacci(n):"
DEMO_TOKENS = 96
DEMO_SEED = 2


@with_options(ServeOptions, "options")
def serve(context: typer.Context, options: ServeOptions) -> None:
    """Serve a model: start router, engines and detokenizers as processes here. Ctrl-C drains, twice stops at once.

    A service that exits is restarted. SIGUSR2 restarts all services, one after another.
    """
    assigned = options.assigned(context)
    protect_output()
    interrupt = Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup, and a shell that runs us in the background, have some ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    # Until the ring is up SIGUSR2 has nothing to restart, but without a handler it would kill this process.
    signal.signal(signal.SIGUSR2, lambda *_: None)
    with Display(options.verbose) as display:
        try:
            if options.detach:
                serve_detached(options.on, context.meta[ARGUMENTS], options.drain_timeout, display)
                return
            ring = Ring(
                **options.of_ring(context),
                shared_args=assigned[ALL],
                router_args=assigned["router"],
                engine_args=assigned["engine"],
                detokenizer_args=assigned["detokenizer"],
                gateway_args=assigned["gateway"],
                observe=display,
            )
            run(ring, options.demo, interrupt, display)
        except KeyboardInterrupt:
            display.say("interrupted", "stopped")
            raise typer.Exit(INTERRUPTED) from None
        except (CheckpointError, OptionsError) as error:
            display.show_error(str(error), START_FAILED)
            raise typer.Exit(1) from error
        except RingError as error:
            # The last lines of the service at fault have been shown as they came.
            display.show_error(error.message, START_FAILED)
            raise typer.Exit(1) from error


def protect_output() -> None:
    """The ring must keep running if its output is full, closed, or not read."""
    protect_stdout()
    stderr = protect_stderr()
    if not stderr.isatty():
        stderr.notice = lines_lost


class Interrupt:
    """Handler of the stop signals: sets `received` and raises KeyboardInterrupt, as Python's own handler does."""

    def __init__(self) -> None:
        # Python discards an exception that is raised while a finalizer runs: then this has it. A plain bool, because a
        # handler may interrupt the holder of any lock.
        self.received = False

    def __call__(self, *_: object) -> None:
        self.received = True
        raise KeyboardInterrupt


def run(ring: Ring, demo: str | None, interrupt: Interrupt, display: Display) -> None:
    """Serve until Ctrl-C, or until all services of one role have been given up."""
    display.say("starting", f"starting {_parts(ring)} …", fields={"model": ring.plan.name, **_counts(ring)})
    with ring, Demo(demo, display) as demonstration:
        try:
            announce(ring, display)
            restart_on_signal(ring, display)
            demonstration.start(ring.address)
            watch(ring, interrupt, display)
        except KeyboardInterrupt:
            drain(ring, display)


def drain(ring: Ring, display: Display) -> None:
    """Let live streams end. Ctrl-C ends everything at once."""
    try:
        # Within the try: a second Ctrl-C may come before the draining has begun.
        display.say("draining", "\ndraining; Ctrl-C again stops at once", fields={"seconds": ring.plan.drain_timeout})
        ring.stop()
    except KeyboardInterrupt:
        ring.kill()
        raise


def announce(ring: Ring, display: Display) -> None:
    """The line that says that the ring is ready, with a command to try."""
    port = ring.address.rsplit(":", 1)[1]
    address = [] if int(port) == DEFAULT_PORT else ["--address", ring.address]
    call = " ".join([_program(), "generate", *address, f'"{EXAMPLE}"'])
    http = f", HTTP on {ring.http_address}" if ring.http_address else ""
    page = f", status page on port {ring.plan.metrics_port}" if ring.plan.metrics_port else ""
    served = f"{ring.plan.name} on {','.join(ring.addresses)}{http}{page}, {_parts(ring)}"
    text = f"ready: {served}. Ctrl-C stops it. Try: {call}"
    fields = {"model": ring.plan.name, "addresses": ring.addresses, **_counts(ring)}
    if http:
        fields["http_address"] = ring.http_address
    display.say("ready", text, fields=fields)


class Demo:
    """Completes a text on stdout, where nothing else is written; None: does nothing. A failure does not end the ring.

    In a thread of its own: an exception that a signal handler raises within gRPC's blocking calls breaks their locks.
    """

    def __init__(self, text: str | None, display: Display) -> None:
        self._text = text
        self._display = display
        self._closing = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.close()

    def start(self, address: str) -> None:
        if self._text is None:
            return
        client = Client(address)
        thread = threading.Thread(target=self._show, args=(client, self._text, address), name="demo", daemon=True)
        thread.start()
        self._closing.callback(thread.join)
        self._closing.callback(client.close)

    def _show(self, client: Client, text: str, address: str) -> None:
        print(f"\n{text}", end="", flush=True)
        request = partial(client.stream, text, request_id=DEMO_REQUEST, max_tokens=DEMO_TOKENS, seed=DEMO_SEED)
        # Closed here too: its connection would remain as long as the ring.
        with client:
            try:
                print_stream(request)
            except Cancelled:
                pass  # the ring has stopped
            except SluiceError as error:
                self._display.show_error(describe(error, address))


def watch(ring: Ring, interrupt: Interrupt, display: Display) -> None:
    """Raises typer.Exit when all routers, all engines or all detokenizers have been given up."""
    missing = ring.watch(lambda: interrupt.received)
    if interrupt.received:
        raise KeyboardInterrupt
    cause = f"no {' and no '.join(missing)} is left" if missing else "the launcher failed"
    display.show_error(f"{cause}: stopping")
    raise typer.Exit(1)


def restart_on_signal(ring: Ring, display: Display) -> None:
    under_way = threading.Lock()

    def restart() -> None:
        if not under_way.acquire(blocking=False):
            display.show_error("a rolling restart is under way already")
            return
        try:
            ring.restart_all()
            display.say("restarted", "all services have been restarted")
        except RingError as error:
            display.show_error(error.message)
        finally:
            under_way.release()

    # In a thread: the main one must stay free for Ctrl-C.
    signal.signal(signal.SIGUSR2, lambda *_: threading.Thread(target=restart, daemon=True).start())


def _program() -> str:
    """How to call this command in another terminal."""
    if shutil.which("sluice"):
        return "sluice"
    called = Path(sys.argv[0])
    return f"{sys.executable} -m sluice" if called.name == "__main__.py" else str(called)


def _counts(ring: Ring) -> dict[str, int]:
    return {"routers": ring.plan.routers, "engines": ring.plan.engines, "detokenizers": ring.plan.detokenizers}


def _parts(ring: Ring) -> str:
    return ", ".join(f"{count} {what if count > 1 else what[:-1]}" for what, count in _counts(ring).items())
