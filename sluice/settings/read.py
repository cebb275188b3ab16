"""Reads settings from flags, the environment, a YAML file and defaults, in that order of precedence.

`assign` reads settings of several services from one place, such as `engine.max_batch_size`, or without a service, such
as `log_level`, for every service that has the setting. Unknown names are errors. `changed_settings` is for the log.
"""

import json
import os
import re
import sys
from argparse import SUPPRESS, Action, ArgumentParser, BooleanOptionalAction
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from sluice.settings.describe import Setting, sections_of, settings_of
from sluice.settings.names import did_you_mean
from sluice.settings.process import ProcessSettings
from sluice.settings.services import PROCESSES

SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP)(_\w+)?$")

ALL = "all"
"""Key of `assign`'s result for values that apply to every service that has the setting."""
CHOSEN_BY_LAUNCHER = frozenset(
    {
        "model",
        "name",
        "revision",
        "id",
        "listen",
        "advertise",
        "keys",
        "host",
        "port",
        "engines",
        "detokenizers",
        "routers",
        "keeper.kv_folder",
    }
)
"""Settings that the launcher of a ring chooses for each service, or for the named one."""
PER_SERVICE = frozenset({"config", "metrics_port"})
"""Settings that several services have, but for which one value cannot apply to all of them."""

CREDENTIALS = re.compile(r"(?<=://)[^/]*@")
"""User and password in a URL. No other setting holds a secret: tokens and keys are in files."""
QUERY = re.compile(r"(?<=://)([^?]*\?).*")

S = TypeVar("S", bound=ProcessSettings)


class SettingsError(ValueError):
    """Some settings are invalid. The message names each of them."""


def load_settings(cls: type[S], argv: Sequence[str] | None = None) -> S:
    """The settings of this process. Exits with a message if they are invalid."""
    try:
        return read_settings(cls, sys.argv[1:] if argv is None else argv, os.environ)
    except SettingsError as error:
        raise SystemExit(str(error)) from error


def read_settings(cls: type[S], argv: Sequence[str], environment: Mapping[str, str]) -> S:
    """The settings of a service with these flags and environment variables. Raises SettingsError."""
    variables, flags = _read_environment(cls, environment), _read_flags(cls, argv)
    overrides = variables | flags
    values = _read_yaml(cls, overrides.get("config")) | overrides
    origins = {name: _variable(settings_of(cls)[name], environment) for name in variables.keys() - flags.keys()}
    try:
        return cls(**{name: _from_text(settings_of(cls)[name], value) for name, value in values.items()})
    except ValidationError as error:
        raise SettingsError("; ".join(_problem(detail, origins) for detail in error.errors())) from error


def assign(pairs: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """Values by service and setting name, from pairs of key and value. If a key occurs twice, the last pair counts.

    A key is SERVICE.NAME, or NAME for all services that have the setting; values for several services are under ALL.
    Raises SettingsError, which names all that is wrong.
    """
    assigned: dict[str, dict[str, Any]] = {service: {} for service in (ALL, *PROCESSES)}
    problems = []
    for given_key, value in pairs:
        try:
            key = _full_key(given_key)
            service, _, name = key.rpartition(".")
            assigned[service or ALL][name] = _parse_setting(key, value)
        except SettingsError as error:
            problems.append(str(error))
    if problems:
        raise SettingsError("; ".join(problems))
    return assigned


def split_assignment(text: str) -> tuple[str, str]:
    """Key and value of a text such as "engine.max_batch_size=64". Raises SettingsError."""
    key, sign, value = text.partition("=")
    if not sign:
        raise SettingsError(f"{text}: must have the form [SERVICE.]NAME=VALUE, such as engine.max_batch_size=64")
    return key.strip(), value


@cache
def assignable() -> Mapping[str, type[ProcessSettings]]:
    """The keys that `assign` accepts, each with the settings class of a service that has the setting."""
    services_by_key: dict[str, type[ProcessSettings]] = {}
    shared = set[str]()
    for service, cls in PROCESSES.items():
        for name, setting in settings_of(cls).items():
            key = f"{service}.{name}"
            if CHOSEN_BY_LAUNCHER & {name, key} or setting.launcher_only:
                continue
            services_by_key[key] = cls
            if name not in PER_SERVICE and name in shared:
                services_by_key[name] = cls
            shared.add(name)
    return services_by_key


def key_of(name: str) -> str | None:
    """The key that assigns the setting `name`, such as engine.max_batch_size. None if the name is unknown."""
    return name if name in assignable() else next((key for key in assignable() if key.endswith(f".{name}")), None)


def _full_key(key: str) -> str:
    """The key in `assignable`: with SERVICE for the name of a setting that only one service has. Raises
    SettingsError."""
    if key in assignable():
        return key
    owned = [known for known in assignable() if known.partition(".")[2] == key]
    if len(owned) == 1:
        return owned[0]
    hint = did_you_mean(key_of(key.rpartition(".")[2]) or key, assignable())
    raise SettingsError(f"unknown setting {key}{hint}")


def _parse_setting(key: str, value: Any) -> Any:
    """Parses and validates a single setting. `value` is text or from YAML. Raises SettingsError."""
    cls, (service, _, name) = assignable()[key], key.rpartition(".")
    try:
        declared = get_type_hints(cls, include_extras=True)[name]
        return TypeAdapter(declared).validate_python(_from_text(settings_of(cls)[name], value))
    except ValidationError as error:
        raise SettingsError("; ".join(_problem({**detail, "loc": (key,)}) for detail in error.errors())) from error
    except SettingsError as error:
        raise SettingsError(f"{service}.{error}" if service else str(error)) from error


class _Parser(ArgumentParser):
    """Reads descriptions only for the help, since that takes as long as everything else here."""

    described: Sequence[tuple[Action, Setting]] = ()

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def format_help(self) -> str:
        for action, setting in self.described:
            action.help = f"{setting.description}{_default_note(setting)}".replace("%", "%%")
        return super().format_help()


def _read_flags(cls: type[ProcessSettings], argv: Sequence[str]) -> dict[str, Any]:
    parser = _Parser(
        prog=f"python -m {cls.module}", usage="%(prog)s [options]", description=cls.summary, allow_abbrev=False
    )
    described = []
    for title, settings in sections_of(cls).items():
        group = parser.add_argument_group(title)
        for setting in settings:
            kind: dict[str, Any] = {"metavar": setting.type_name.replace(" | ", "|")}
            if setting.annotation is bool:
                kind = {"action": BooleanOptionalAction}
            elif get_origin(setting.annotation) is tuple:
                kind |= {"action": "extend", "type": _parts}
            action = group.add_argument(setting.flag, dest=setting.name, default=None, help=SUPPRESS, **kind)
            if not setting.launcher_only:
                described.append((action, setting))
    parser.described = described
    arguments, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = {setting.flag for setting in settings_of(cls).values()}
        hint = did_you_mean(unknown[0].split("=")[0], flags)
        raise SettingsError(f"unknown arguments: {' '.join(unknown)}{hint}")
    return {name: value for name, value in vars(arguments).items() if value is not None}


def _default_note(setting: Setting) -> str:
    """The default, for the help. Empty if it is no value: the description then says what applies by default."""
    if setting.default in ("unset", "empty"):
        return ""
    return " [required]" if setting.default == "required" else f" [default: {setting.default}]"


def _read_yaml(cls: type[ProcessSettings], file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            values = yaml.safe_load(stream) or {}
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise SettingsError(f"cannot read the settings file {file}: {error}") from error
    if not isinstance(values, dict):
        raise SettingsError(f"the settings file {file} must be a YAML mapping of names to values")
    if "config" in values:
        raise SettingsError(
            f"the settings file {file} sets config: only a flag or an environment variable may name a settings file"
        )
    unknown = [key for key in values if key not in settings_of(cls)]
    if unknown:
        problems = (f"unknown setting {key}{did_you_mean(str(key), settings_of(cls))}" for key in unknown)
        raise SettingsError(f"{file}: {'; '.join(problems)}")
    return values


def _read_environment(cls: type[ProcessSettings], environment: Mapping[str, str]) -> dict[str, Any]:
    names = {setting.variable: name for name, setting in settings_of(cls).items()}
    variables = {
        variable: value
        for variable, value in environment.items()
        if variable.startswith(cls.prefix()) and not _is_service_link(variable, value)
    }
    unknown = sorted(variables.keys() - names.keys())
    if unknown:
        hint = did_you_mean(unknown[0], names)
        raise SettingsError(f"unknown settings in the environment: {', '.join(unknown)}{hint}")
    shared = {setting.other_variable: name for name, setting in settings_of(cls).items() if setting.other_variable}
    values = {name: environment[variable] for variable, name in shared.items() if environment.get(variable)}
    return values | {names[variable]: text for variable, text in variables.items()}


def _variable(setting: Setting, environment: Mapping[str, str]) -> str:
    """The environment variable from which the value of `setting` was read."""
    return setting.variable if setting.variable in environment else setting.other_variable or ""


def _is_service_link(variable: str, value: str) -> bool:
    # Kubernetes sets such variables for every Service of the namespace. A Service named sluice-router, for example,
    # yields SLUICE_ROUTER_PORT.
    return bool(SERVICE_LINK.search(variable)) or (
        variable.endswith("_PORT") and value.startswith(("tcp://", "udp://"))
    )


def _from_text(setting: Setting, value: Any) -> Any:
    """Splits lists and parses JSON; pydantic converts the rest."""
    origin = get_origin(setting.annotation)
    if origin is tuple:
        # A YAML file may have a single value instead of a list.
        return _parts(value) if isinstance(value, str) else value if isinstance(value, list | tuple) else [value]
    if origin is dict and isinstance(value, str):
        try:
            return json.loads(value)
        except ValueError as error:
            requirement = f'must be a JSON object, such as {{"name": {_example(setting)}}}'
            raise SettingsError(f"{setting.name}: {requirement} ({error})") from error
    return value


def _example(setting: Setting) -> str:
    """An example of a mapping's value, as JSON."""
    _, value_type = get_args(setting.annotation)
    return "1" if value_type in (int, float) else '"value"'


def _parts(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def _problem(error: ErrorDetails, origins: Mapping[str, str] = MappingProxyType({})) -> str:
    """The message for one error of pydantic. `origins`: by setting, the environment variable that it was read from."""
    message = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
    if not error["loc"]:
        return message
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{name} is required: set --{name.replace('_', '-')}"
    variable = origins.get(str(error["loc"][0]))
    origin = f" from {variable}" if variable else ""
    return f"{name}: {message.partition(', unable to parse')[0]} (got {error.get('input')!r}{origin})"


def changed_settings(settings: ProcessSettings) -> dict[str, Any]:
    """The settings that differ from their defaults, by name, without those that only a launcher passes."""
    described = settings_of(type(settings))
    return {
        field.name: _loggable(value)
        for field in fields(settings)
        if (value := getattr(settings, field.name)) != _default(field) and not described[field.name].launcher_only
    }


def _default(field: Field[Any]) -> Any:
    return field.default if field.default_factory is MISSING else field.default_factory()


def _loggable(value: Any) -> Any:
    match value:
        case str() | Path():
            return _masked(str(value))
        case tuple():
            return [_loggable(part) for part in value]
        case dict():
            return {name: _loggable(part) for name, part in value.items()}
    return value


def _masked(text: str) -> str:
    """The text without user, password and query, if it is a URL."""
    return QUERY.sub(r"\1…", CREDENTIALS.sub("…@", text))
