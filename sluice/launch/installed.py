"""Checks that this installation can start a ring."""

from sluice.host.installation import how_to_install, missing_packages
from sluice.launch.gpus import OptionsError

EXTRAS = ("router", "detok", "engine")


def check_installed() -> None:
    """Raises OptionsError if packages are missing."""
    if missing := missing_packages(*EXTRAS):
        raise OptionsError(
            f"this installation cannot serve: missing {', '.join(missing)}. Install with: {how_to_install(*EXTRAS)}"
        )
