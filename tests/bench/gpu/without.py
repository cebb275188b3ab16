"""A Python program as on machines with only torch and transformers."""

MISSING = (
    "msgspec",
    "structlog",
    "pydantic",
    "rich",
    "zmq",
    "grpc",
    "prometheus_client",
    "matplotlib",
)


def hide(packages: tuple[str, ...]) -> str:
    return f"""
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
from importlib import util
found = util.find_spec
util.find_spec = lambda name, package=None: None if name in {packages!r} else found(name, package)
sys.meta_path.insert(0, Missing())
"""


WITHOUT = hide(MISSING)
WITHOUT_NUMBA = hide((*MISSING, "numba"))
"""As on a machine with a GPU, which may lack numba. On a CPU, log-probabilities need numba."""
