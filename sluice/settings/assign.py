"""Settings of several services in one place: `engine.max_batch_size`, or `log_level` for every service that has it."""

from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from sluice.ring.names import did_you_mean
from sluice.settings.describe import settings_of
from sluice.settings.read import SettingsError, parse_setting
from sluice.settings.services import SERVICES, ServiceSettings

ALL = "all"
LAUNCHERS_OWN = frozenset(
    {"model", "name", "revision", "id", "listen", "advertise", "keys", "host", "port", "engines", "detokenizers"}
)
"""Settings that the launcher of a ring chooses for each service."""
DIFFERENT = frozenset({"config", "metrics_port"})
"""Settings that no two services have alike."""


def assign(pairs: Iterable[tuple[str, Any]]) -> dict[str, dict[str, Any]]:
    """Values by service and name; ALL has those of keys without a service. Later pairs win. Raises SettingsError."""
    found: dict[str, dict[str, Any]] = {service: {} for service in (ALL, *SERVICES)}
    for key, value in pairs:
        if key not in assignable():
            hint = did_you_mean(key_of(key.rpartition(".")[2]) or key, assignable())
            raise SettingsError(f"unknown setting {key}{hint}")
        service, _, name = key.rpartition(".")
        try:
            found[service or ALL][name] = parse_setting(assignable()[key], name, value)
        except SettingsError as error:
            raise SettingsError(f"{service}.{error}" if service else str(error)) from error
    return found


def split_assignment(text: str) -> tuple[str, str]:
    """Key and value of a text such as "engine.max_batch_size=64". Raises SettingsError."""
    key, sign, value = text.partition("=")
    if not sign:
        raise SettingsError(f"{text}: must be of the form SERVICE.NAME=VALUE, such as engine.max_batch_size=64")
    return key.strip(), value


@cache
def assignable() -> Mapping[str, type[ServiceSettings]]:
    """A service that has it, by key."""
    found: dict[str, type[ServiceSettings]] = {}
    for service, cls in SERVICES.items():
        for name, setting in settings_of(cls).items():
            if name in LAUNCHERS_OWN or setting.launcher_only:
                continue
            found[f"{service}.{name}"] = cls
            if name not in DIFFERENT and sum(name in settings_of(other) for other in SERVICES.values()) > 1:
                found[name] = cls
    return found


def key_of(name: str) -> str | None:
    """The key of a setting whose name alone is known; None: there is no such setting."""
    return name if name in assignable() else next((key for key in assignable() if key.endswith(f".{name}")), None)
