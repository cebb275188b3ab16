"""Where the services of a ring run: as processes of this machine, or as actors of a Ray cluster."""

from sluice.launch.hosts.hosts import LOCAL, Hosts, Peers, open_hosts

__all__ = ["LOCAL", "Hosts", "Peers", "open_hosts"]
