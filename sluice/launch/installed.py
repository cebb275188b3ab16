"""Whether this installation can start a ring."""

from sluice.launch.gpus import OptionsError
from sluice.ring.extras import how_to_install, missing_packages

EXTRAS = ("router", "detok", "engine")


def check_installed() -> None:
    """Raises OptionsError."""
    if missing := missing_packages(*EXTRAS):
        raise OptionsError(f"this installation cannot serve, it has no {', '.join(missing)}: {how_to_install(*EXTRAS)}")
