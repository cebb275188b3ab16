"""The options of `sluice serve`."""

from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from sluice.cli.config_file import read_config_file, settings_of_file
from sluice.client import DEFAULT_ADDRESS
from sluice.launch import OptionsError
from sluice.settings.read import SettingsError, assign, key_of, split_assignment

DEFAULT_PORT = int(DEFAULT_ADDRESS.rsplit(":", 1)[1])

FLAGS = (
    "engine.tensor_parallel", "engine.device", "engine.dtype", "engine.kv_cache_tokens", "engine.max_batch_size",
    "router.tls_certificate", "router.tls_key", "router.insecure", "router.tokens_file", "router.admin_port",
)  # fmt: skip
"""Settings that have an option of the same name."""
OF_RING = (
    "name", "revision", "engines", "detokenizers", "routers", "host", "port", "metrics_port", "drain_timeout",
    "start_timeout",
)  # fmt: skip
"""Options that `Ring` takes under the same name."""


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


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Every field is an option, in the order in which --help lists them."""

    model: Annotated[str | None, typer.Argument(help="Checkpoint folder or hub id; default: the model in the box")] = (
        None
    )
    model_option: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="The same, as an option")] = None
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=read_config_file,
            metavar="FILE",
            help="YAML file of these options; router:, engine: and detokenizer: hold further settings",
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Served name of the model; default: its folder's")] = None
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model; default: its main branch")
    ] = None
    host: Annotated[str, typer.Option(help="Interface to listen on; others than loopback need TLS or --insecure")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any")] = DEFAULT_PORT
    engines: Annotated[int, typer.Option(min=1, help="Engine processes, each on its own GPUs")] = 1
    detokenizers: Annotated[int, typer.Option(min=1, help="Detokenizer processes")] = 2
    routers: Annotated[int, typer.Option(min=1, help="Router processes, on this port and those after it")] = 1
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs, or CPU processes, per engine")] = None
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: a GPU where there is one")] = None
    dtype: Annotated[
        str | None, typer.Option(help="float32; on a GPU also bfloat16 or float16; default: the model's own there")
    ] = None
    kv_cache_tokens: Annotated[
        int | None, typer.Option(min=1, help="KV cache per engine, in tokens; default: by free memory")
    ] = None
    max_batch_size: Annotated[int | None, typer.Option(min=1, help="Sequences per step; default: 64")] = None
    tls_certificate: Annotated[str | None, typer.Option(metavar="PEM", help="Certificate, then its chain")] = None
    tls_key: Annotated[str | None, typer.Option(metavar="PEM", help="Private key of the certificate")] = None
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without TLS")] = False
    tokens_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Only these tokens may call: lines TOKEN TENANT [admin]")
    ] = None
    admin_port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="Port for AdminService alone, of the first router; default: the main one"),
    ] = None
    metrics_port: Annotated[
        int,
        typer.Option(
            min=0, max=65535, help="Metrics and health: port of the router, the others have the ports after it; 0: none"
        ),
    ] = 0
    drain_timeout: Annotated[float, typer.Option(min=0, help="Seconds for live streams to end after Ctrl-C")] = 10.0
    start_timeout: Annotated[float, typer.Option(min=1, help="Seconds for the ring to get ready")] = 600.0
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="SERVICE.NAME=VALUE",
            help="Any other setting of router, engine or detokenizer, such as engine.max_tokens_per_step=1024; "
            "repeatable; docs/settings.md lists them",
        ),
    ] = None
    demo: Annotated[str | None, typer.Option(metavar="TEXT", help="Complete this text once ready")] = None
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show everything that the services log")] = False

    def assigned(self, context: typer.Context) -> dict[str, dict[str, Any]]:
        """Settings by service: of the file, of options, of --set; the later ones win. Raises typer.BadParameter."""
        flags = ((key, getattr(self, key.partition(".")[2])) for key in FLAGS)
        given = [(key, value) for key, value in flags if value is not None and value is not False]
        try:
            return assign([*settings_of_file(context), *given, *map(split_assignment, self.settings or [])])
        except SettingsError as error:
            raise typer.BadParameter(str(error)) from error

    def of_ring(self, context: typer.Context) -> dict[str, Any]:
        """The arguments of `Ring` but for its settings. Raises OptionsError."""
        if self.demo is not None and (self.tls_certificate or self.tokens_file):
            raise OptionsError("--demo shows no token and no certificate: try `sluice generate` once it serves")
        # The option comes before the argument, which the settings file may have given.
        source = context.get_parameter_source("model")
        if None not in (self.model, self.model_option) and source is not None and source.name == "COMMANDLINE":
            raise OptionsError(f"the model is given twice: {self.model} and --model {self.model_option}")
        model = self.model if self.model_option is None else self.model_option
        return {"model": model, **{name: getattr(self, name) for name in OF_RING}}
