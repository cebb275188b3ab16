"""Checks and measures the engine where a GPU is at hand; needs torch, transformers and this checkout. See docs/gpu.md.

Importing it puts stand-ins where packages that the engine's core imports are missing, so that what is imported after it
finds them.
"""

from bench.gpu.standins import install

install()
