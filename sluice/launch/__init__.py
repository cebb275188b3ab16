"""Starts the services of a ring, on this machine or on a Ray cluster, and keeps them running."""

from sluice.launch.child import Child
from sluice.launch.display import DEMO_REQUEST, Display
from sluice.launch.errors import RingError
from sluice.launch.gpus import OptionsError
from sluice.launch.local_ring import Ring
from sluice.launch.logs import LogLine
from sluice.launch.plan import Plan

__all__ = ["DEMO_REQUEST", "Child", "Display", "LogLine", "OptionsError", "Plan", "Ring", "RingError"]
