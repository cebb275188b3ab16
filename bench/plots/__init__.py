"""One picture per part."""

from bench.plots.batching import of_batching
from bench.plots.peers import of_peers
from bench.plots.prefix import of_prefix
from bench.plots.ring import of_ring

__all__ = ["of_batching", "of_peers", "of_prefix", "of_ring"]
