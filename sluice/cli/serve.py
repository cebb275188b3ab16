"""`sluice serve`: a whole ring on this machine."""

import shutil
import signal
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sluice.cli.common import describe
from sluice.cli.config_file import read_config_file
from sluice.cli.generate import print_stream
from sluice.client import DEFAULT_ADDRESS, Client, SluiceError
from sluice.launch import DEMO_REQUEST, Display, OptionsError, Ring, RingError
from sluice.launch.logs import lines_lost
from sluice.ring.checkpoint import CheckpointError
from sluice.ring.process import INTERRUPTED, START_FAILED
from sluice.telemetry.output import protect_stderr, protect_stdout

EXAMPLE = "def fibonacci(n):"
DEMO_TOKENS = 96
DEMO_SEED = 2
DEFAULT_PORT = int(DEFAULT_ADDRESS.rsplit(":", 1)[1])


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
            help="YAML file of these options, such as max_batch_size: 8; the command line comes first",
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
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads per engine; default: the cores, shared out")
    ] = None,
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs, or CPU processes, per engine")] = None,
    kv_cache_tokens: Annotated[int | None, typer.Option(min=1, help="KV cache per engine, in tokens")] = None,
    kv_memory_fraction: Annotated[
        float | None,
        typer.Option(metavar="FRACTION", help="Part of the free memory; default: 0.9 on a GPU, 0.5 on a CPU, shared"),
    ] = None,
    kv_host_memory: Annotated[
        str | None, typer.Option(metavar="BYTES", help="Host memory per engine for evicted KV cache, such as 8GiB")
    ] = None,
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step")] = None,
    max_tokens_per_step: Annotated[
        int | None, typer.Option(min=1, help="Tokens computed per step, prompts' too")
    ] = None,
    capacity_scheduler_policy: Annotated[
        str | None, typer.Option(help="max_utilization, guaranteed_no_evict, static_batch or your own module:Class")
    ] = None,
    chunked_context: Annotated[
        bool | None, typer.Option("--chunked-context/--no-chunked-context", help="Long prompts over several steps")
    ] = None,
    context_chunking_policy: Annotated[
        str | None, typer.Option(help="first_come_first_served or equal_progress")
    ] = None,
    micro_batch_scheduler: Annotated[
        str | None, typer.Option(metavar="MODULE:CLASS", help="Who runs in a step; default: all")
    ] = None,
    priority_aging_seconds: Annotated[
        float | None, typer.Option(min=0, help="In which a waiting request gains a priority class; 0: never")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(metavar="MODULE:CLASS", help="Your own scheduler in place of both")
    ] = None,
    attention: Annotated[str | None, typer.Option(help="Attention backend; default: the best for the device")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="float32; on a GPU also bfloat16 or float16; default: the fastest")
    ] = None,
    tls_certificate: Annotated[str | None, typer.Option(metavar="PEM", help="Certificate, then its chain")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="PEM", help="Its key")] = None,
    tls_client_ca: Annotated[
        str | None, typer.Option(metavar="PEM", help="Clients need a certificate that one of these issued")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without TLS")] = False,
    tokens_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Only these tokens may call: lines TOKEN TENANT [admin]")
    ] = None,
    admin_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port for AdminService alone; default: the main one")
    ] = None,
    admin_tokens_file: Annotated[str | None, typer.Option(metavar="FILE", help="Tokens for that port")] = None,
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Metrics and health: port of the router, the others have the next ones; 0: none"
        ),
    ] = 0,
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for live streams to end after Ctrl-C")] = 10.0,
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the ring to get ready")] = 600.0,
    demo: Annotated[str | None, typer.Option(metavar="TEXT", help="Complete this text once ready")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show everything that the services log")] = False,
) -> None:
    """Serve a model: start router, engines and detokenizers as processes here. Ctrl-C drains, twice stops at once.

    What ends by itself is started again. SIGUSR2 restarts all, one after the other.
    """
    engine_args = {
        "threads": threads,
        "tensor_parallel": tensor_parallel,
        "kv_cache_tokens": kv_cache_tokens,
        "kv_memory_fraction": kv_memory_fraction,
        "kv_host_memory": kv_host_memory,
        "max_batch_size": max_batch_size,
        "max_tokens_per_step": max_tokens_per_step,
        "capacity_scheduler_policy": capacity_scheduler_policy,
        "chunked_context": chunked_context,
        "context_chunking_policy": context_chunking_policy,
        "micro_batch_scheduler": micro_batch_scheduler,
        "scheduler": scheduler,
        "attention": attention,
        "device": device,
        "dtype": dtype,
    }
    router_args = {
        "tls_certificate": tls_certificate,
        "tls_key": tls_key,
        "tls_client_ca": tls_client_ca,
        "insecure": insecure or None,
        "tokens_file": tokens_file,
        "admin_port": admin_port,
        "admin_tokens_file": admin_tokens_file,
    }
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
                engine_args={key: value for key, value in engine_args.items() if value is not None},
                router_args={key: value for key, value in router_args.items() if value is not None},
                metrics_port=metrics_port,
                drain_timeout=drain_timeout,
                priority_aging_seconds=priority_aging_seconds,
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
