"""A Python program for machines that have torch and transformers alone."""

MISSING = (
    "msgspec",
    "structlog",
    "pydantic",
    "rich",
    "zmq",
    "grpc",
    "prometheus_client",
    "matplotlib",
    "numba",
)
WITHOUT = f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {MISSING!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
from importlib import util
found = util.find_spec
util.find_spec = lambda name, package=None: None if name in {MISSING!r} else found(name, package)
sys.meta_path.insert(0, Missing())
"""
