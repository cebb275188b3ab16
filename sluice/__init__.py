"""Sluice serves large language models over gRPC: the Python library and command line."""

__version__ = "0.1.0"
