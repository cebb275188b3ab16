"""The commands of `sluice`."""

from typing import Annotated

import typer

from sluice import __version__
from sluice.cli.adapters import lora, prompt_adapter
from sluice.cli.admin import cache_events, call, serving_version
from sluice.cli.bench import bench
from sluice.cli.chat import chat
from sluice.cli.convert import convert
from sluice.cli.generate import GenerateCommand, generate
from sluice.cli.health import health
from sluice.cli.keygen import keygen
from sluice.cli.protos import protos
from sluice.cli.serve import serve
from sluice.cli.serve_options import ServeCommand
from sluice.cli.stats import stats
from sluice.cli.top import top

app = typer.Typer(
    name="sluice",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
    rich_markup_mode=None,
)
app.command(cls=ServeCommand)(serve)
app.command(cls=GenerateCommand)(generate)
app.command()(chat)
app.command()(health)
app.command()(stats)
app.command()(top)
app.command()(bench)
app.command()(call)
app.command()(cache_events)
app.command()(convert)
app.command()(serving_version)
app.command()(keygen)
app.add_typer(lora, name="lora")
app.add_typer(prompt_adapter, name="prompt-adapter")
app.add_typer(protos, name="protos")


def _print_version(value: bool) -> None:
    if value:
        print(f"sluice {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Serve large language models over gRPC.

    `sluice serve` starts a server. The other commands connect to a running server, by default the one on this machine.
    """
