"""How a service reads its settings: flag, environment, YAML file, default, in that order. Unknown keys are errors."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails
from pydantic_settings import BaseSettings, CliSettingsSource, SettingsError

from sluice.ring.keys import Keys, Role, Security
from sluice.ring.names import did_you_mean

SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP)(_\w+)?$")


class ServiceSettings(BaseSettings):
    """Base of each service's config. A field is the flag --some-field and the variable SLUICE_SERVICE_SOME_FIELD."""

    model_config = ConfigDict(extra="forbid", frozen=True)  # type: ignore[assignment]

    config: str | None = Field(None, description="YAML file of settings; flags and environment variables come first")
    keys: Path | None = Field(
        None, description="folder of the ring's keys, see `sluice keygen`; tcp:// between services needs them"
    )
    insecure_ring: bool = Field(
        False, description="use tcp:// between services without keys: whoever reaches the port is let in"
    )

    def security(self, role: Role) -> Security:
        """How a service of this role protects its lanes. Raises KeysError."""
        return Security(None if self.keys is None else Keys(self.keys, role), self.insecure_ring)


S = TypeVar("S", bound=ServiceSettings)


def load_settings(settings: type[S], program: str, prefix: str, argv: Sequence[str] | None = None) -> S:
    """Read `settings`; environment variables begin with `prefix`. Bad input ends the process with a clear message."""
    flags = _read_flags(settings, program, list(sys.argv[1:] if argv is None else argv))
    found = _read_environment(settings, prefix) | flags
    try:
        return settings.model_validate(_read_yaml(settings, found.get("config")) | found)
    except ValidationError as error:
        raise SystemExit("; ".join(_problem(each) for each in error.errors())) from error


def _read_flags(settings: type[S], program: str, argv: list[str]) -> dict[str, Any]:
    try:
        return CliSettingsSource(
            settings,
            cli_prog_name=program,
            cli_parse_args=argv,
            cli_exit_on_error=False,
            cli_kebab_case=True,
            cli_implicit_flags=True,
            cli_hide_none_type=True,
            cli_avoid_json=True,
        )()
    except SettingsError as error:
        known = {f"--{name.replace('_', '-')}" for name in settings.model_fields}
        message = str(error).removeprefix("error parsing CLI: ")
        named = [flag for flag in (word.split("=")[0] for word in argv) if flag.startswith("--") and flag in message]
        hint = "".join(did_you_mean(flag, known) for flag in named[:1] if flag not in known)
        raise SystemExit(f"{message}{hint}") from error


def _problem(error: ErrorDetails) -> str:
    if not error["loc"]:
        return error["msg"].removeprefix("Value error, ")
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "missing":
        return f"{name} is needed: --{name.replace('_', '-')}"
    return f"{name}: {error['msg'].removeprefix('Value error, ')} (got {error.get('input')!r})"


def _read_yaml(settings: type[BaseModel], file: str | None) -> dict[str, Any]:
    if file is None:
        return {}
    try:
        with open(file, encoding="utf-8") as stream:
            found = yaml.safe_load(stream) or {}
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"cannot read the settings file {file}: {error}") from error
    if not isinstance(found, dict):
        raise SystemExit(f"the settings file {file} must hold keys and values")
    if "config" in found:
        raise SystemExit(f"the settings file {file} names another one: config is for flags and the environment")
    for key in found:
        if key not in settings.model_fields:
            raise SystemExit(f"{file}: unknown setting {key}{did_you_mean(str(key), settings.model_fields)}")
    return found


def _read_environment(settings: type[BaseModel], prefix: str) -> dict[str, Any]:
    names = {f"{prefix}{name.upper()}": name for name in settings.model_fields}
    given = {
        variable: value
        for variable, value in os.environ.items()
        if variable.startswith(prefix) and not _is_service_link(variable, value)
    }
    unknown = sorted(given.keys() - names.keys())
    if unknown:
        hint = did_you_mean(unknown[0], names)
        raise SystemExit(f"unknown settings in the environment: {', '.join(unknown)}{hint}")
    return {names[variable]: _from_text(settings, names[variable], text) for variable, text in given.items()}


def _is_service_link(variable: str, value: str) -> bool:
    """Kubernetes sets such variables for every Service: those of one named sluice-router have our prefix."""
    return bool(SERVICE_LINK.search(variable)) or (
        variable.endswith("_PORT") and value.startswith(("tcp://", "udp://"))
    )


def _from_text(settings: type[BaseModel], name: str, text: str) -> Any:
    if get_origin(settings.model_fields[name].annotation) is tuple:
        return [part for part in text.split(",") if part]
    return text
