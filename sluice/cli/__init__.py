"""The `sluice` command."""

from sluice.cli.app import app, main

__all__ = ["app", "main"]
