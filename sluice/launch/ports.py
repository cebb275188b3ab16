"""The TCP ports of a ring."""

from collections.abc import Iterable, Iterator, Mapping

from sluice.launch.asked import asked
from sluice.launch.plan import Service
from sluice.ring.ports import Port

LOOPBACK = "127.0.0.1"
INTERFACES = {"port": "host", "admin_port": "admin_host", "metrics_port": "metrics_host"}
"""Settings that name a port, and those that name its interface."""


def ports(services: Iterable[Service], environment: Mapping[str, str]) -> Iterator[Port]:
    """All that these services are going to listen on."""
    for service in services:
        for setting, interface in INTERFACES.items():
            number = str(asked(service.role, setting, service.settings, environment) or 0)
            host = asked(service.role, interface, service.settings, environment) or LOOPBACK
            # The service itself refuses what is no number.
            if number.isdecimal() and (setting == "metrics_port" or service.role == "router"):
                yield Port(setting, str(host), int(number), service.name)
