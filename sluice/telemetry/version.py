"""The version of this build."""

from importlib.metadata import PackageNotFoundError, version


def build_version() -> str:
    try:
        return version("sluice")
    except PackageNotFoundError:
        return "unknown"
