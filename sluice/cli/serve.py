"""`sluice serve`: a whole ring on this machine."""

import shutil
import signal
import sys
import threading
from collections.abc import Mapping
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sluice.cli.common import describe
from sluice.cli.config_file import read_config_file, settings_of_file
from sluice.cli.generate import print_stream
from sluice.client import DEFAULT_ADDRESS, Client, SluiceError
from sluice.launch import DEMO_REQUEST, Display, OptionsError, Ring, RingError
from sluice.launch.logs import lines_lost
from sluice.ring.checkpoint import CheckpointError
from sluice.ring.process import INTERRUPTED, START_FAILED
from sluice.settings.read import ALL, SettingsError, assign, key_of, split_assignment
from sluice.telemetry.output import protect_stderr, protect_stdout

EXAMPLE = "def fibonacci(n):"
DEMO_TOKENS = 96
DEMO_SEED = 2
DEFAULT_PORT = int(DEFAULT_ADDRESS.rsplit(":", 1)[1])


class ServeCommand(TyperCommand):
    """Knows the --set form of a setting that is given as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises typer.BadParameter."""
        options = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        for flag in (word.split("=")[0] for word in takewhile("--".__ne__, args)):
            key = key_of(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
            if flag.startswith("--") and flag not in options and key:
                raise typer.BadParameter(f"there is no option {flag}; it is a setting: --set {key}=…")
        return super().parse_args(ctx, args)


def serve(
    context: typer.Context,
    model: Annotated[
        str | None, typer.Argument(help="Checkpoint folder or hub id; default: the model in the box")
    ] = None,
    model_option: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="The same, as an option")] = None,
    config: Annotated[  # noqa: ARG001 - its callback reads it
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=read_config_file,
            metavar="FILE",
            help="YAML file of these options; router:, engine: and detokenizer: hold further settings",
        ),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Served name of the model; default: its folder's")] = None,
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model; default: its main branch")
    ] = None,
    host: Annotated[
        str, typer.Option(help="Interface to listen on; others than loopback need TLS or --insecure")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any")] = DEFAULT_PORT,
    engines: Annotated[int, typer.Option(min=1, help="Engine processes, each on its own GPUs")] = 1,
    detokenizers: Annotated[int, typer.Option(min=1, help="Detokenizer processes")] = 2,
    routers: Annotated[int, typer.Option(min=1, help="Router processes, on this port and those after it")] = 1,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs, or CPU processes, per engine")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32; on a GPU also bfloat16 or float16; default: the model's own there")
    ] = None,
    kv_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV cache per engine, in tokens; default: by free memory")
    ] = None,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step; default: 64")] = None,
    tls_certificate: Annotated[str | None, typer.Option(metavar="PEM", help="Certificate, then its chain")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="PEM", help="Private key of the certificate")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without TLS")] = False,
    tokens_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Only these tokens may call: lines TOKEN TENANT [admin]")
    ] = None,
    admin_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port for AdminService alone, of the first router; default: the main one"),
    ] = None,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Metrics and health: port of the router, the others have the ports after it; 0: none"
        ),
    ] = 0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for live streams to end after Ctrl-C")] = 10.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the ring to get ready")] = 600.0,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SERVICE.NAME=VALUE",
            help="Any other setting of router, engine or detokenizer, such as engine.max_tokens_per_step=1024; "
            "repeatable; docs/settings.md lists them",
        ),
    ] = None,
    demo: Annotated[str | None, typer.Option(metavar="TEXT", help="Complete this text once ready")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show everything that the services log")] = False,
) -> None:
    """Serve a model: start router, engines and detokenizers as processes here. Ctrl-C drains, twice stops at once.

    A service that ends by itself is started again. SIGUSR2 restarts all, one after the other.
    """
    flags = {
        "engine.tensor_parallel": tensor_parallel,
        "engine.device": device,
        "engine.dtype": dtype,
        "engine.kv_cache_tokens": kv_cache_tokens,
        "engine.max_batch_size": max_batch_size,
        "router.tls_certificate": tls_certificate,
        "router.tls_key": tls_key,
        "router.insecure": insecure or None,
        "router.tokens_file": tokens_file,
        "router.admin_port": admin_port,
    }
    assigned = _assign(context, flags, settings or [])
    protect_output()
    interrupt = Interrupt()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # nohup, and a shell that runs us in the background, have some ignored.
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    # There is nothing to restart before it is up, and unheard it would end us.
    signal.signal(signal.SIGUSR2, lambda *_: None)
    with Display(verbose) as display:
        try:
            if demo is not None and (tls_certificate or tokens_file):
                raise OptionsError("--demo shows no token and no certificate: try `sluice generate` once it serves")
            ring = Ring(
                _chosen_model(context, model, model_option),
                name=name,
                revision=revision,
                engines=engines,
                detokenizers=detokenizers,
                routers=routers,
                host=host,
                port=port,
                shared_args=assigned[ALL],
                router_args=assigned["router"],
                engine_args=assigned["engine"],
                detokenizer_args=assigned["detokenizer"],
                metrics_port=metrics_port,
                drain_timeout=drain_timeout,
                start_timeout=start_timeout,
                observe=display,
            )
            run(ring, demo, interrupt, display)
        except KeyboardInterrupt:
            display.say("interrupted", "stopped")
            raise typer.Exit(INTERRUPTED) from None
        except (CheckpointError, OptionsError) as error:
            display.complain(str(error), START_FAILED)
            raise typer.Exit(1) from error
        except RingError as error:
            # The last lines of the service at fault have been shown as they came.
            display.complain(error.message, START_FAILED)
            raise typer.Exit(1) from error


def _assign(context: typer.Context, flags: Mapping[str, Any], texts: list[str]) -> dict[str, dict[str, Any]]:
    """Settings of the services, by service: of the file, of options, of --set; the later ones win."""
    try:
        given = [(key, value) for key, value in flags.items() if value is not None]
        return assign([*settings_of_file(context), *given, *map(split_assignment, texts)])
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from error


def _chosen_model(context: typer.Context, model: str | None, option: str | None) -> str | None:
    """The option comes before the argument, which the settings file may have given. Raises OptionsError."""
    source = context.get_parameter_source("model")
    if None not in (model, option) and source is not None and source.name == "COMMANDLINE":
        raise OptionsError(f"the model is given twice: {model} and --model {option}")
    return model if option is None else option


def protect_output() -> None:
    """A ring goes on where its output is full, closed, or not read."""
    protect_stdout()
    stderr = protect_stderr()
    if not stderr.isatty():
        stderr.notice = lines_lost


class Interrupt:
    """Handler of the signals that end us: raises KeyboardInterrupt, as Python does, and remembers.

    For an exception that comes while a finalizer runs is swallowed.
    """

    def __init__(self) -> None:
        # No lock may be taken in a handler.
        self.came = False

    def __call__(self, *_: object) -> None:
        self.came = True
        raise KeyboardInterrupt


def run(ring: Ring, demo: str | None, interrupt: Interrupt, display: Display) -> None:
    """Serve until Ctrl-C, or until nothing is left that can."""
    display.say("starting", f"starting {_parts(ring)} …", fields={"model": ring.plan.name, **_counts(ring)})
    with ring:
        try:
            announce(ring, display)
            restart_on_signal(ring, display)
            if demo is not None:
                show_demo(ring, demo, display)
            watch(ring, interrupt, display)
        except KeyboardInterrupt:
            drain(ring, display)


def drain(ring: Ring, display: Display) -> None:
    """Let live streams end. Ctrl-C, also one that comes before that has begun, ends everything at once."""
    try:
        display.say("draining", "\ndraining; Ctrl-C again stops at once", fields={"seconds": ring.plan.drain_timeout})
        ring.stop()
    except KeyboardInterrupt:
        ring.kill()
        raise


def announce(ring: Ring, display: Display) -> None:
    """The one line that says that it is ready."""
    port = ring.address.rsplit(":", 1)[1]
    where = [] if int(port) == DEFAULT_PORT else ["--address", ring.address]
    call = " ".join([_program(), "generate", *where, f'"{EXAMPLE}"'])
    text = f"ready: {ring.plan.name} on {','.join(ring.addresses)}, {_parts(ring)}. Try: {call}"
    fields = {"model": ring.plan.name, "addresses": ring.addresses, **_counts(ring)}
    display.say("ready", text, fields=fields)


def show_demo(ring: Ring, text: str, display: Display) -> None:
    """Complete a text on stdout, where nothing else goes; after a failure serving goes on."""
    print(f"\n{text}", end="", flush=True)
    with Client(ring.address) as client:
        try:
            print_stream(partial(client.stream, text, request_id=DEMO_REQUEST, max_tokens=DEMO_TOKENS, seed=DEMO_SEED))
        except SluiceError as error:
            display.complain(describe(error, ring.address))


def watch(ring: Ring, interrupt: Interrupt, display: Display) -> None:
    """Raises typer.Exit when all routers, all engines or all detokenizers have been given up."""
    missing = ring.watch(lambda: interrupt.came)
    if interrupt.came:
        raise KeyboardInterrupt
    display.complain(f"no {' and no '.join(missing)} is left: stopping" if missing else "the launcher failed: stopping")
    raise typer.Exit(1)


def restart_on_signal(ring: Ring, display: Display) -> None:
    """SIGUSR2 restarts all services, one after the other, while the others serve."""
    under_way = threading.Lock()

    def restart() -> None:
        if not under_way.acquire(blocking=False):
            display.complain("a rolling restart is under way already")
            return
        try:
            ring.restart_all()
            display.say("restarted", "all services have been restarted")
        except RingError as error:
            display.complain(error.message)
        finally:
            under_way.release()

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
