"""Checks and measures the engine on a GPU; needs only torch, transformers and this checkout. See docs/gpu.md.

Importing this package installs stand-ins for missing packages, so that later imports of the engine's core succeed.
"""

from bench.gpu.standins import install

install()
