"""Starts the services of a ring, on this machine or on a Ray cluster, and keeps them running."""

from sluice.launch.display import DEMO_REQUEST, Display
from sluice.launch.errors import OptionsError, RingError
from sluice.launch.hosts import Child
from sluice.launch.local_ring import Ring
from sluice.launch.logs import LogLine
from sluice.launch.plan import Plan

__all__ = ["DEMO_REQUEST", "Child", "Display", "LogLine", "OptionsError", "Plan", "Ring", "RingError"]
