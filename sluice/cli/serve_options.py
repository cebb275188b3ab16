"""The options of `sluice serve`, and its settings file, whose keys are the options and a section for each service."""

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
from sluice.settings.names import did_you_mean
from sluice.settings.read import SettingsError, assign, assignable, key_of, split_assignment
from sluice.settings.services import PROCESSES

DEFAULT_PORT = int(DEFAULT_ADDRESS.rsplit(":", 1)[1])

FLAGS = (
    "engine.tensor_parallel", "engine.device", "engine.dtype", "engine.kv_cache_tokens", "engine.max_batch_size",
    "router.tls_certificate", "router.tls_key", "router.insecure", "router.tokens_file", "router.admin_port",
)  # fmt: skip
"""Settings that are also options, under the same name."""
RING_ARGUMENTS = (
    "name", "revision", "engines", "prefill_engines", "decode_engines", "detokenizers", "routers", "gateways",
    "kv_keeper", "kv_disk", "keys", "on", "host", "port", "http_port", "metrics_port", "drain_timeout", "start_timeout",
)  # fmt: skip
"""Options that `Ring` accepts under the same name."""
FILE_SETTINGS = __name__
"""Key in the context for the settings from the file, as pairs such as ("engine.max_batch_size", 8)."""
ARGUMENTS = f"{__name__}.arguments"
"""Key in the context for the command's unparsed arguments."""
NO_KEYS = ("config", "model_option", "settings", "detach")
"""Options that are not keys of the file: --config itself, --model (its key is `model`), --set, and --detach."""


class ServeCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Raises typer.BadParameter, with a hint for settings that have to be given with --set."""
        ctx.meta[ARGUMENTS] = tuple(args)
        options = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        for flag in (word.split("=")[0] for word in takewhile("--".__ne__, args)):
            key = key_of(flag.removeprefix("--").removeprefix("no-").replace("-", "_"))
            if flag.startswith("--") and flag not in options and key:
                raise typer.BadParameter(f"{flag} is a setting, not an option; use --set {key}=…")
        return super().parse_args(ctx, args)


def read_config_file(context: typer.Context, file: Path | None) -> Path | None:
    """Callback of --config: values in the file replace the options' defaults. Raises typer.BadParameter."""
    if file is not None:
        values = _read(file)
        keys = [str(parameter.name) for parameter in context.command.params if parameter.name not in NO_KEYS]
        options = {key: value for key, value in values.items() if key in keys}
        context.default_map = _options(file, options)
        context.meta[FILE_SETTINGS] = _settings(
            file, {key: value for key, value in values.items() if key not in options}, keys
        )
    return file


def _read(file: Path) -> dict[str, Any]:
    """Raises typer.BadParameter."""
    try:
        values = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise typer.BadParameter(f"cannot read {file}: {' '.join(str(error).split())}") from error
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise typer.BadParameter(f"{file} must be a YAML mapping, with entries such as port: 50051")
    return values


def _settings(file: Path, values: Mapping[str, Any], options: list[str]) -> list[tuple[str, Any]]:
    """The settings in the file's values that are not options. Raises typer.BadParameter, which names all that is
    wrong."""
    settings: list[tuple[str, Any]] = []
    problems: list[str] = []
    for key, value in values.items():
        if key in PROCESSES and isinstance(value, dict | None):
            settings += [(f"{key}.{name}", setting_value) for name, setting_value in (value or {}).items()]
        elif key in PROCESSES:
            problems.append(f"{key} must be a mapping of settings to values (got {value})")
        elif key in assignable():
            settings.append((key, value))
        else:
            problems.append(_unknown_key(str(key), options))
    try:
        assign(settings)
    except SettingsError as error:
        problems.append(str(error))
    if problems:
        raise typer.BadParameter(f"{file}: {'; '.join(problems)}")
    return settings


def _unknown_key(key: str, options: list[str]) -> str:
    setting = key_of(key)
    if setting:
        return f"unknown key {key}; it is a setting: {setting.replace('.', ': ')}"
    return f"unknown key {key}{did_you_mean(key, [*options, *PROCESSES])}"


def _options(file: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Defaults for the options, from the file's values. Raises typer.BadParameter."""
    for key, value in options.items():
        if isinstance(value, dict | list):
            raise typer.BadParameter(f"{file}: {key} must be a single value (got {value})")
    # As text, so that they are validated like options: as a number, 2.5 would be truncated to 2.
    return {
        key: value if isinstance(value, bool) else str(value) for key, value in options.items() if value is not None
    }


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Every field is an option, in the order in which --help lists them."""

    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL", help="Folder of a checkpoint, or a Hugging Face id. Default: the small bundled model."
        ),
    ] = None
    model_option: Annotated[
        str | None, typer.Option("--model", metavar="MODEL", help="Same as the argument MODEL.")
    ] = None
    config: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=read_config_file,
            metavar="FILE",
            help="YAML file with values for these options. Its sections router, engine, detokenizer, gateway and "
            "keeper contain further settings of the services.",
        ),
    ] = None
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="[SERVICE.]NAME=VALUE",
            help="Set any setting of a service, such as engine.max_tokens_per_step=1024. Repeatable. "
            "docs/settings.md lists all settings.",
        ),
    ] = None
    name: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Name under which the model is served. Default: its folder's name."),
    ] = None
    revision: Annotated[
        str | None,
        typer.Option(
            metavar="REVISION", help="Branch, tag or commit of a Hugging Face model. Default: its main branch."
        ),
    ] = None
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST", help="Address to listen on. Any address other than loopback needs TLS or --insecure."
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port of the gRPC server. 0: any free port.")
    ] = DEFAULT_PORT
    http_port: Annotated[
        int,
        typer.Option(metavar="PORT", min=0, max=65535, help="Also serve the OpenAI HTTP API, on this port. 0: do not."),
    ] = 0
    metrics_port: Annotated[
        int,
        typer.Option(
            metavar="PORT",
            min=0,
            max=65535,
            help="Port of the first router for its status page, metrics and health checks. The other services use the "
            "following ports. 0: none.",
        ),
    ] = 0
    admin_port: Annotated[
        int | None,
        typer.Option(
            metavar="PORT",
            min=1,
            max=65535,
            help="Separate port for the first router's AdminService; other routers use the following ports. "
            "Default: the main port.",
        ),
    ] = None
    engines: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Number of engines, each on its own GPUs. Default: 1, or 0 with --prefill-engines or "
            "--decode-engines.",
        ),
    ] = None
    prefill_engines: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of engines that compute only prompts and first tokens.")
    ] = 0
    decode_engines: Annotated[
        int, typer.Option(metavar="N", min=0, help="Number of engines that compute only the tokens after the first.")
    ] = 0
    detokenizers: Annotated[int, typer.Option(metavar="N", min=1, help="Number of detokenizers.")] = 2
    routers: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of routers, on --port and the following ports.")
    ] = 1
    gateways: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of HTTP gateways, which share --http-port.")
    ] = 1
    kv_keeper: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Also start a keeper, which hands KV blocks to engines of other machines. They reach it at this "
            "address, tcp://IP:PORT.",
        ),
    ] = None
    kv_disk: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Also start a keeper, which copies the KV blocks of long prefixes to this folder, from which engines "
            "read them after a restart.",
        ),
    ] = None
    tensor_parallel: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Number of GPUs, or of processes on a CPU, per engine. Default: 1."),
    ] = None
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="cpu or cuda. Default: cuda if a GPU is available.")
    ] = None
    dtype: Annotated[
        str | None,
        typer.Option(
            metavar="DTYPE",
            help="float32, bfloat16 or float16. Default: float32 on a CPU, the checkpoint's dtype on a GPU.",
        ),
    ] = None
    kv_cache_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=1, help="Size of each engine's KV cache in tokens. Default: depends on the free memory."
        ),
    ] = None
    max_batch_size: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Maximum number of sequences in a step. Default: 64.")
    ] = None
    tls_certificate: Annotated[
        str | None,
        typer.Option(metavar="PEM", help="The server's certificate, followed by its chain. Enables TLS."),
    ] = None
    tls_key: Annotated[str | None, typer.Option(metavar="PEM", help="Private key of the certificate.")] = None
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Accept connections from other machines without TLS.")
    ] = False
    tokens_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help='Bearer tokens that callers must send, one "TOKEN TENANT [admin]" per line.'),
    ] = None
    keys: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Keys of the ring (sluice keygen FOLDER), which encrypt the connections of services and keeper.",
        ),
    ] = None
    on: Annotated[
        str,
        typer.Option(metavar="PLACE", help="Where the services run: local, or ray[=ADDRESS] for a Ray cluster."),
    ] = "local"
    detach: Annotated[
        bool,
        typer.Option(
            "--detach", help="With --on ray: run the launcher as a job of the cluster, and return once ready."
        ),
    ] = False
    start_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=1, help="Time until the ring must be ready.")
    ] = 600.0
    drain_timeout: Annotated[
        float,
        typer.Option(metavar="SECONDS", min=0, help="Time that requests in progress have to finish after Ctrl-C."),
    ] = 10.0
    demo: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Complete this text as a demonstration once the ring is ready.")
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show all log messages of the services.")] = False

    def assigned(self, context: typer.Context) -> dict[str, dict[str, Any]]:
        """Settings by service. --set overrides options, which override the file. Raises typer.BadParameter."""
        flags = ((key, getattr(self, key.partition(".")[2])) for key in FLAGS)
        options = [(key, value) for key, value in flags if value is not None and value is not False]
        try:
            return assign([*context.meta.get(FILE_SETTINGS, ()), *options, *map(split_assignment, self.settings or [])])
        except SettingsError as error:
            raise typer.BadParameter(str(error)) from error

    def ring_arguments(self, context: typer.Context) -> dict[str, Any]:
        """The arguments of `Ring`, except settings. Raises OptionsError."""
        if self.demo is not None and (self.tls_certificate or self.tokens_file):
            raise OptionsError("--demo does not support TLS or tokens: use `sluice generate` once the ring is ready")
        # --model overrides the model of the settings file, but not an argument.
        source = context.get_parameter_source("model")
        if None not in (self.model, self.model_option) and source is not None and source.name == "COMMANDLINE":
            raise OptionsError(f"the model is given twice: {self.model} and --model {self.model_option}")
        model = self.model if self.model_option is None else self.model_option
        return {"model": model} | {name: getattr(self, name) for name in RING_ARGUMENTS}
