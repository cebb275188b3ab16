"""The machines on which the services of a ring run: this one, or those of a Ray cluster."""

from sluice.launch.hosts.hosts import LOCAL, RAY, Child, Hosts, Peers, place

__all__ = ["LOCAL", "RAY", "Child", "Hosts", "Peers", "place"]
