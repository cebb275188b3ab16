"""The engines of a ring by the phase of requests that they compute: prefill, decode, or both."""

from collections.abc import Mapping
from typing import Any

from sluice.launch.errors import OptionsError

Phases = Mapping[str, str | None]
"""The phase of each engine by its name. None: both, unless the engines' settings say otherwise."""


def phases_of(engines: int | None, prefill_engines: int, decode_engines: int) -> Phases:
    """The engines of a ring with these options. `engines` of None: 1, or 0 if there are engines of a phase."""
    if engines is None:
        engines = 0 if prefill_engines or decode_engines else 1
    return {
        **{f"engine-{i}": None for i in range(engines)},
        **{f"engine-prefill-{i}": "prefill" for i in range(prefill_engines)},
        **{f"engine-decode-{i}": "decode" for i in range(decode_engines)},
    }


def check_phases(engines: int | None, prefill_engines: int, decode_engines: int, settings: Mapping[str, Any]) -> None:
    """Raises OptionsError for numbers of engines that cannot serve. `settings`: those of all engines."""
    counts = {"prefill_engines": prefill_engines, "decode_engines": decode_engines}
    for name, count in counts.items():
        if count < 0:
            raise OptionsError(f"{name} must be at least 0 (got {count})")
    least = 0 if any(counts.values()) else 1
    if engines is not None and engines < least:
        raise OptionsError(f"engines must be at least {least} (got {engines})")
    for (name, count), other in zip(counts.items(), reversed(counts), strict=True):
        if count and not counts[other] and not engines:
            raise OptionsError(f"{name} needs {other} or engines, which compute the other phase of each request")
        if count and settings.get("phase") is not None:
            raise OptionsError(f"{name} contradicts engine_args: phase is {settings['phase']} for all engines")
