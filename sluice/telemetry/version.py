"""The version of this build."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "sluice-serve"
"""Name on PyPI, where another project is called sluice."""


def build_version() -> str:
    """The installed version; "unknown" in a checkout that is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
