"""The options of `sluice serve`, and its settings file: options as keys, and a section for each service."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from typer.core import TyperCommand

from sluice.client import DEFAULT_ADDRESS
from sluice.launch import OptionsError
from sluice.ring.names import did_you_mean
from sluice.settings.read import SettingsError, assign, assignable, key_of, split_assignment
from sluice.settings.services import SERVICES

DEFAULT_PORT = int(DEFAULT_ADDRESS.rsplit(":", 1)[1])

FLAGS = (
    "engine.tensor_parallel", "engine.device", "engine.dtype", "engine.kv_cache_tokens", "engine.max_batch_size",
    "router.tls_certificate", "router.tls_key", "router.insecure", "router.tokens_file", "router.admin_port",
)  # fmt: skip
"""Settings that have an option of the same name."""
OF_RING = (
    "name", "revision", "engines", "detokenizers", "routers", "on", "host", "port", "http_port", "metrics_port",
    "drain_timeout", "start_timeout",
)  # fmt: skip
"""Options that `Ring` takes under the same name."""
# Under this key the context holds settings from the file, such as ("engine.max_batch_size", 8).
FILE_SETTINGS = __name__
ARGUMENTS = f"{__name__}.arguments"
"""Under this key the context holds the command's arguments as they were given."""
NO_KEYS = ("config", "model_option", "settings", "detach")
"""Options that are not keys of the file: --config itself, --model (its key is `model`), --set, and --detach."""


class ServeCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises typer.BadParameter, with the --set form of a setting that is given as an option."""
        ctx.meta[ARGUMENTS] = tuple(args)
        options = {name for each in self.params for name in (*each.opts, *each.secondary_opts)}
        for flag in (word.split("=")[0] for word in takewhile("--".__ne__, args)):
            key = key_of(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
            if flag.startswith("--") and flag not in options and key:
                raise typer.BadParameter(f"there is no option {flag}; it is a setting: --set {key}=…")
        return super().parse_args(ctx, args)


def read_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Callback of --config: options in the file replace the defaults. Raises typer.BadParameter."""
    if file is not None:
        found, known = _read(file), [str(each.name) for each in context.command.params if each.name not in NO_KEYS]
        options = {key: value for key, value in found.items() if key in known}
        context.default_map = _options(file, options)
        context.meta[FILE_SETTINGS] = _settings(file, {key: found[key] for key in found.keys() - options}, known)
    return file


def _read(file: Path) -> dict[str, Any]:
    try:
        found = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {file}: {' '.join(str(error).split())}") from error
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise typer.BadParameter(f"{file} must hold keys and values, such as port: 50051")
    return found


def _settings(file: Path, found: Mapping[str, Any], options: list[str]) -> list[tuple[str, Any]]:
    settings: list[tuple[str, Any]] = []
    for key, value in found.items():
        if key in SERVICES and isinstance(value, dict | None):
            settings += [(f"{key}.{name}", each) for name, each in (value or {}).items()]
        elif key in SERVICES:
            raise typer.BadParameter(f"{file}: {key} must hold keys and values, not {value}")
        elif key in assignable():
            settings.append((key, value))
        else:
            place = f"; it is a setting: {setting.replace('.', ': ')}" if (setting := key_of(str(key))) else ""
            hint = place or did_you_mean(str(key), [*options, *SERVICES])
            raise typer.BadParameter(f"{file}: unknown key {key}{hint}")
    return settings


def _options(file: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in options.items():
        if isinstance(value, dict | list):
            raise typer.BadParameter(f"{file}: {key} must have a single value, not {value}")
    # As text, they are checked like options; as a number, 2.5 would be cut to 2.
    return {
        key: value if isinstance(value, bool) else str(value) for key, value in options.items() if value is not None
    }


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Every field is an option, in the order in which --help lists them."""

    model: Annotated[str | None, typer.Argument(help="Checkpoint folder or hub id; default: the bundled model")] = None
    model_option: Annotated[str | None, typer.Option("--model", metavar="MODEL", help="The same, as an option")] = None
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=read_config_file,
            metavar="FILE",
            help="YAML file of these options; router:, engine:, detokenizer: and gateway: hold further settings",
        ),
    ] = None
    name: Annotated[str | None, typer.Option(help="Served name of the model; default: its folder's")] = None
    revision: Annotated[
        str | None, typer.Option(help="Branch, tag or commit of a hub model; default: its main branch")
    ] = None
    on: Annotated[
        str,
        typer.Option(
            metavar="PLACE", help="Where services run: local, or ray[=ADDRESS], a Ray cluster: an actor per service"
        ),
    ] = "local"
    host: Annotated[str, typer.Option(help="Interface to listen on; others than loopback need TLS or --insecure")] = (
        "127.0.0.1"
    )
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: any")] = DEFAULT_PORT
    http_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Also serve the OpenAI HTTP API on this port; 0: not")
    ] = 0
    engines: Annotated[int, typer.Option(min=1, help="Engine processes, each on its own GPUs")] = 1
    detokenizers: Annotated[int, typer.Option(min=1, help="Detokenizer processes")] = 2
    routers: Annotated[int, typer.Option(min=1, help="Router processes, on this port and those after it")] = 1
    tensor_parallel: Annotated[int | None, typer.Option(min=1, help="GPUs, or CPU processes, per engine")] = None
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is a GPU")] = None
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
            help="Any other setting of a service, such as engine.max_tokens_per_step=1024; "
            "repeatable; docs/settings.md lists them",
        ),
    ] = None
    demo: Annotated[str | None, typer.Option(metavar="TEXT", help="Complete this text once ready")] = None
    detach: Annotated[
        bool,
        typer.Option("--detach", help="With --on ray: the launcher runs as a job of the cluster"),
    ] = False
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show everything that the services log")] = False

    def assigned(self, context: typer.Context) -> dict[str, dict[str, Any]]:
        """Settings by service: of the file, of options, of --set; the later ones win. Raises typer.BadParameter."""
        flags = ((key, getattr(self, key.partition(".")[2])) for key in FLAGS)
        given = [(key, value) for key, value in flags if value is not None and value is not False]
        try:
            return assign([*context.meta.get(FILE_SETTINGS, ()), *given, *map(split_assignment, self.settings or [])])
        except SettingsError as error:
            raise typer.BadParameter(str(error)) from error

    def of_ring(self, context: typer.Context) -> dict[str, Any]:
        """The arguments of `Ring`, except settings. Raises OptionsError."""
        # The demo's client has none of these.
        if self.demo is not None and (self.tls_certificate or self.tokens_file):
            raise OptionsError("--demo cannot use TLS or tokens: try `sluice generate` once it serves")
        # The option comes before the argument, which the settings file may have given.
        source = context.get_parameter_source("model")
        if None not in (self.model, self.model_option) and source is not None and source.name == "COMMANDLINE":
            raise OptionsError(f"the model is given twice: {self.model} and --model {self.model_option}")
        model = self.model if self.model_option is None else self.model_option
        return {"model": model} | {name: getattr(self, name) for name in OF_RING}
