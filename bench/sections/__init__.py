"""Results into words and tables, the same for the page and the terminal. One file per part."""

from bench.sections.chunked import of_chunked
from bench.sections.deaths import of_deaths, of_soak, soaked
from bench.sections.host import of_host
from bench.sections.overload import of_overload
from bench.sections.peers import of_peers
from bench.sections.policies import of_policies
from bench.sections.prefix import of_prefix
from bench.sections.restart import of_restart
from bench.sections.retention import of_retention
from bench.sections.ring import of_ring
from bench.sections.scheduler import of_scheduler
from bench.sections.slow_reader import of_slow_reader

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
    "soaked",
]
