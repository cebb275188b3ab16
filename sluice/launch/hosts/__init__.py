"""Where the services of a ring run: as processes of this machine, or as actors of a Ray cluster."""

from sluice.launch.hosts.hosts import LOCAL, RAY, Hosts, Peers, open_hosts, place

__all__ = ["LOCAL", "RAY", "Hosts", "Peers", "open_hosts", "place"]
