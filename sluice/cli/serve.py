"""`sluice serve`: starts a ring and runs until it is stopped; with --detach, as a job of a Ray cluster."""

import asyncio
import shlex
import shutil
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Self

import typer

from sluice.checkpoint.errors import CheckpointError
from sluice.cli.common import describe, with_options
from sluice.cli.serve_options import ARGUMENTS, DEFAULT_PORT, ServeOptions
from sluice.cli.stream_printer import print_stream
from sluice.client import Cancelled, Client, SluiceError
from sluice.host.output import protect_stderr, protect_stdout
from sluice.host.process import INTERRUPTED, START_FAILED
from sluice.launch import DEMO_REQUEST, Display, OptionsError, Ring, RingError
from sluice.launch.hosts import RAY, place
from sluice.launch.logs import lines_lost
from sluice.launch.supervisor import KILL_AFTER_SECONDS
from sluice.settings.read import ALL
from sluice.settings.services import RouterSettings

DEMO_TOKENS = 96
DEMO_SEED = 2
DRAINS = 2
"""Number of times that `drain_timeout` may elapse while a ring stops: routers drain first, then the other services."""
ON_THE_CLUSTER = ("--on", "ray=auto")
EXAMPLE_CODE = "def fibonacci(n):"
"""A prompt for the bundled model, which completes Python."""
EXAMPLE_TEXT = "Once upon a time"
PRINT_FIRST = "NF && $1 !~ /^(#|sha256:)/ {print $1; exit}"
"""An awk program that prints the first token of a tokens file that is not a hash."""


@with_options(ServeOptions, "options")
def serve(context: typer.Context, options: ServeOptions) -> None:
    """Serve a model on this machine or on a Ray cluster.

    Starts router, engines and detokenizers as separate processes and restarts those that exit. Ctrl-C lets requests in
    progress finish; a second Ctrl-C stops immediately. SIGUSR2 restarts all services, one after another.
    """
    assigned = options.assigned(context)
    protect_output()
    interrupt = Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # Under nohup, or in the background of a shell, some of them are ignored and must stay so.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    # SIGUSR2 has nothing to restart before the ring is up, but without a handler it would kill this process.
    signal.signal(signal.SIGUSR2, lambda *_: None)
    with Display(options.verbose) as display:
        try:
            if options.detach:
                serve_detached(options.on, context.meta[ARGUMENTS], options.drain_timeout, display)
                return
            ring = Ring(
                **options.ring_arguments(context),
                shared_args=assigned[ALL],
                router_args=assigned["router"],
                engine_args=assigned["engine"],
                detokenizer_args=assigned["detokenizer"],
                gateway_args=assigned["gateway"],
                keeper_args=assigned["keeper"],
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
            # The display has already shown the last lines of the service at fault.
            display.show_error(error.message, START_FAILED)
            raise typer.Exit(1) from error


def protect_output() -> None:
    """Keep the ring running if its output is closed, not read, or goes to a full disk."""
    protect_stdout()
    stderr = protect_stderr()
    if not stderr.isatty():
        stderr.notice = lines_lost


class Interrupt:
    """Handler of the stop signals. Sets `received` and raises KeyboardInterrupt, as Python's own handler does."""

    def __init__(self) -> None:
        # Python discards an exception that is raised while a finalizer runs, so the flag is needed as well. It is a
        # plain bool because the handler may interrupt the holder of any lock.
        self.received = False

    def __call__(self, *_: object) -> None:
        self.received = True
        raise KeyboardInterrupt


def run(ring: Ring, demo: str | None, interrupt: Interrupt, display: Display) -> None:
    """Serve until Ctrl-C. Raises typer.Exit if all services of one role have failed permanently."""
    display.say("starting", f"starting {_parts(ring)} …", fields={"model": ring.plan.name, **ring.plan.counts})
    with ring, Demo(demo, display) as demonstration:
        try:
            announce(ring, display)
            restart_on_signal(ring, display)
            demonstration.start(ring.address)
            watch(ring, interrupt, display)
        except KeyboardInterrupt:
            drain(ring, display)


def drain(ring: Ring, display: Display) -> None:
    """Stop the ring once its requests have finished, or immediately on another Ctrl-C."""
    try:
        # Within the `try`, since the second Ctrl-C may arrive before draining has begun.
        text = "\ndraining; press Ctrl-C again to stop immediately"
        display.say("draining", text, fields={"seconds": ring.plan.drain_timeout})
        ring.stop()
    except KeyboardInterrupt:
        ring.kill()
        raise


def announce(ring: Ring, display: Display) -> None:
    """Print that the ring is ready, with its addresses and a command to try."""
    call = first_command(ring.address, ring.router_settings, chats=ring.chats, bundled=ring.is_bundled)
    http = f", HTTP on {ring.http_address}" if ring.http_address else ""
    page = f", status page {','.join(ring.status_pages)}" if ring.status_pages else ""
    served = f"{ring.plan.name} on {','.join(ring.addresses)}{http}{page}, {_parts(ring)}"
    text = f"ready: {served}. Ctrl-C stops it. Try: {call}"
    fields = {"model": ring.plan.name, "addresses": ring.addresses, **ring.plan.counts}
    if http:
        fields["http_address"] = ring.http_address
    if page:
        fields["status_pages"] = ring.status_pages
    display.say("ready", text, fields=fields)


class Demo:
    """Completes the text of --demo and prints it to stdout. Does nothing without one. A failure does not end the ring.

    Runs in a separate thread, because an exception that a signal handler raises within one of gRPC's blocking calls
    would break gRPC's locks.
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
        # Closed here as well as in `__exit__`: otherwise the connection would stay open until the ring stops.
        with client:
            try:
                print_stream(request)
            except Cancelled:
                pass  # The ring has stopped.
            except SluiceError as error:
                self._display.show_error(describe(error, address))


def watch(ring: Ring, interrupt: Interrupt, display: Display) -> None:
    """Wait until all routers, all engines or all detokenizers have failed permanently, then raise typer.Exit."""
    failed_roles = ring.watch(lambda: interrupt.received)
    if interrupt.received:
        raise KeyboardInterrupt
    cause = f"no {' and no '.join(failed_roles)} is left" if failed_roles else "the launcher failed"
    display.show_error(f"{cause}: stopping")
    raise typer.Exit(1)


def restart_on_signal(ring: Ring, display: Display) -> None:
    """From now on, SIGUSR2 restarts all services, one after another."""
    restarting = threading.Lock()

    def restart() -> None:
        if not restarting.acquire(blocking=False):
            display.show_error("a rolling restart is already in progress")
            return
        try:
            ring.restart_all()
            display.say("restarted", "all services have been restarted")
        except RingError as error:
            display.show_error(error.message)
        finally:
            restarting.release()

    # In a thread, since the main thread must stay free for Ctrl-C.
    signal.signal(signal.SIGUSR2, lambda *_: threading.Thread(target=restart, daemon=True).start())


def _parts(ring: Ring) -> str:
    counts = ((name.replace("_", " "), count) for name, count in ring.plan.counts.items())
    return ", ".join(f"{count} {plural if count > 1 else plural[:-1]}" for plural, count in counts)


def serve_detached(on: str, arguments: Sequence[str], drain_timeout: float, display: Display) -> None:
    """Submit `sluice serve ARGUMENTS` as a job and wait until the ring is ready. Raises OptionsError, RingError."""
    kind, address = place(on)
    if kind != RAY:
        raise OptionsError("--detach needs --on ray, where the cluster runs the launcher; on one machine use systemd")
    # ray takes seconds to import. `place` has checked that it is installed.
    from sluice.launch.ray_job import RayJob

    job = RayJob(address, ["serve", *job_arguments(arguments)], DRAINS * (drain_timeout + KILL_AFTER_SECONDS))
    display.say("submitted", f"job {job.id} starts the ring. Its log: ray job logs {job.id}", fields={"job": job.id})
    try:
        ready = asyncio.run(job.ready(display))
    except KeyboardInterrupt:
        text = f"the job {job.id} continues to run. To stop it: ray job stop {job.id}"
        display.say("detached", text, fields={"job": job.id})
        return
    addresses = list(ready.fields["addresses"])
    text = f"ready: {ready.fields['model']} on {','.join(addresses)}. To stop it: ray job stop {job.id}"
    display.say("ready", text, fields={"job": job.id, "model": ready.fields["model"], "addresses": addresses})


def job_arguments(arguments: Sequence[str]) -> list[str]:
    """The arguments of `sluice serve` within the job: without --detach, and on the cluster that runs the job."""
    options = list(takewhile("--".__ne__, arguments))
    return [option for option in options if option != "--detach"] + [*ON_THE_CLUSTER, *arguments[len(options) :]]


def first_command(address: str, router: RouterSettings, *, chats: bool, bundled: bool) -> str:
    """A command line for the server at `address`, to be copied: it connects as the router's settings require.

    `chats`: whether the model has a chat template. `bundled`: whether it is the bundled model.
    """
    command = ["chat"] if chats and not bundled else ["generate"]
    if int(address.rpartition(":")[2]) != DEFAULT_PORT:
        command += ["--address", address]
    if router.tls_certificate is not None:
        # The client trusts exactly this certificate, whoever issued it.
        command += ["--tls-ca", str(Path(router.tls_certificate).absolute())]
    if router.tls_client_ca is not None:
        command += ["--tls-cert", "CLIENT.pem", "--tls-key", "CLIENT.key"]
    prompt = [] if command[0] == "chat" else [f'"{EXAMPLE_CODE if bundled else EXAMPLE_TEXT}"']
    return " ".join([*_token(router), _program(), *map(shlex.quote, command), *prompt])


def _token(router: RouterSettings) -> Iterator[str]:
    """The assignment of SLUICE_TOKEN, if callers need a token. It does not show the token, because logs keep output."""
    if router.tokens_file is not None and _has_readable_token(file := Path(router.tokens_file).absolute()):
        yield f"SLUICE_TOKEN=$(awk '{PRINT_FIRST}' {shlex.quote(str(file))})"
    elif router.authenticates:
        yield "SLUICE_TOKEN=TOKEN"


def _has_readable_token(file: Path) -> bool:
    """Whether the file has a token that is not a hash."""
    if not file.exists():
        # The router runs on another machine.
        return False
    words = (line.split("#", 1)[0].split() for line in file.read_text("utf-8").splitlines())
    return any(first and not first[0].startswith("sha256:") for first in words)


def _program() -> str:
    """The command line that runs `sluice` in another terminal."""
    if shutil.which("sluice"):
        return "sluice"
    script = Path(sys.argv[0])
    return f"{sys.executable} -m sluice" if script.name == "__main__.py" else str(script)
