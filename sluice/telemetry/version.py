"""The version of this build."""

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "sluice-serve"
"""On PyPI, where another project has the package's name."""


def build_version() -> str:
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "unknown"
