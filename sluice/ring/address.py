"""Addresses of inboxes; and that at which other services reach one, from what it is bound to and the operator gave."""

import ipaddress
from contextlib import suppress

TCP = "tcp://"
MAX_PORT = 65535


def is_ip(host: str) -> bool:
    """Not a name. Without brackets."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def tcp_address(host: str, port: int | str) -> str:
    """`host` without brackets, which an IPv6 address gets."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def is_wildcard(address: str) -> bool:
    """Whether it stands for every interface of this machine: nobody can connect to it."""
    if not address.startswith(TCP):
        return False
    host, _ = _split(address.removeprefix(TCP))
    return _every_interface(host)


def check_advertised(listen: str, advertise: str | None) -> None:
    """Raises ValueError, which names the setting, if other services could not reach the inbox."""
    if advertise is None:
        if is_wildcard(listen):
            raise ValueError(
                f"listen: {listen} is every interface of this machine, which is no address to connect to: "
                "set advertise to the name or IP address at which the other services reach it"
            )
        return
    # Any port in place of the bound one, which is not known yet.
    reachable_at(f"{TCP}localhost:1" if listen.startswith(TCP) else listen, advertise)


def reachable_at(bound: str, advertise: str | None) -> str:
    """The address for the other services: the bound one, or `advertise`, which may be a host, host:port or an address.

    Without a port it has the bound one; an IPv6 address gets its brackets. Raises ValueError.
    """
    if advertise is None or advertise.startswith("ipc://"):
        return advertise or bound
    if "://" in advertise.removeprefix(TCP):
        raise ValueError(f"advertise: must be a host, host:port or tcp://host:port (got {advertise!r})")
    host, port = _split(advertise.removeprefix(TCP))
    if not host or _every_interface(host) or any(character.isspace() for character in host):
        raise ValueError(f"advertise: needs a name or an IP address to connect to (got {advertise!r})")
    if port is None:
        if not bound.startswith(TCP):
            raise ValueError(f"advertise: needs a port, because listen is {bound} (got {advertise!r})")
        port = bound.rpartition(":")[2]
    if not (port.isascii() and port.isdigit() and 0 < int(port) <= MAX_PORT):
        raise ValueError(f"advertise: the port must be 1 to {MAX_PORT} (got {advertise!r})")
    return tcp_address(host, port)


def _split(text: str) -> tuple[str, str | None]:
    """Host without brackets, and port. An IPv6 address without brackets has no port."""
    with suppress(ValueError):
        return str(ipaddress.IPv6Address(text)), None
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":") if rest else None
    host, colon, port = text.rpartition(":")
    return (host, port) if colon else (text, None)


def _every_interface(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == "*"
