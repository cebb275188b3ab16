"""One picture per part."""

from bench.plots.chunked import of_chunked
from bench.plots.deaths import of_deaths, of_soak
from bench.plots.host import of_host
from bench.plots.overload import of_overload
from bench.plots.peers import of_peers
from bench.plots.policies import of_policies
from bench.plots.prefix import of_prefix
from bench.plots.restart import of_restart
from bench.plots.retention import of_retention
from bench.plots.ring import of_ring
from bench.plots.scheduler import of_scheduler
from bench.plots.slow_reader import of_slow_reader

__all__ = [
    "of_chunked",
    "of_deaths",
    "of_host",
    "of_overload",
    "of_peers",
    "of_policies",
    "of_prefix",
    "of_restart",
    "of_retention",
    "of_ring",
    "of_scheduler",
    "of_slow_reader",
    "of_soak",
]
