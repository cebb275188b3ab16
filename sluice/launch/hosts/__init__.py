"""The machines on which the services of a ring run: this one, or those of a Ray cluster."""

from sluice.launch.hosts.hosts import LOCAL, RAY, Hosts, Peers, open_hosts, place

__all__ = ["LOCAL", "RAY", "Hosts", "Peers", "open_hosts", "place"]
