"""Addresses of inboxes, and the address at which other services reach an inbox that is bound to a given one."""

import ipaddress
from contextlib import suppress

TCP = "tcp://"
MAX_PORT = 65535


def is_ip(host: str) -> bool:
    """Whether `host` is an IP address, without brackets, instead of a name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def tcp_address(host: str, port: int | str) -> str:
    """The address of a host, which must not be in brackets. They are added to an IPv6 address."""
    return f"{TCP}[{host}]:{port}" if ":" in host else f"{TCP}{host}:{port}"


def is_tcp_socket(address: str) -> bool:
    """Whether this is tcp://IP:PORT, so that one process can listen there and others can connect."""
    if not address.startswith(TCP):
        return False
    host, port = _split(address.removeprefix(TCP))
    return is_ip(host) and not _every_interface(host) and _is_port(port or "")


def is_wildcard(address: str) -> bool:
    """Whether the address means every interface of this machine, so that no peer can connect to it."""
    if not address.startswith(TCP):
        return False
    host, _ = _split(address.removeprefix(TCP))
    return _every_interface(host)


def is_local(address: str) -> bool:
    """Whether the address can be reached from this machine only."""
    if not address.startswith(TCP):
        return True
    host, _ = _split(address.removeprefix(TCP))
    return host == "localhost" or (is_ip(host) and ipaddress.ip_address(host).is_loopback)


def check_advertised(listen: str, advertise: str | None) -> None:
    """Raises ValueError, which names the setting, if other services could not reach the inbox."""
    if advertise is None:
        if is_wildcard(listen):
            raise ValueError(
                f"listen: {listen} means every interface of this machine, so other services cannot connect to it: "
                "set advertise to the name or IP address at which they reach this machine"
            )
        return
    # Port 1 stands for the bound port, which is not known yet.
    reachable_at(f"{TCP}localhost:1" if listen.startswith(TCP) else listen, advertise)


def reachable_at(bound: str, advertise: str | None) -> str:
    """The address for the other services: `bound`, or `advertise`, which is a host, host:port or a full address.

    If `advertise` has no port, the bound port is added. Brackets are added to an IPv6 address. Raises ValueError.
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
    if not _is_port(port):
        raise ValueError(f"advertise: the port must be 1 to {MAX_PORT} (got {advertise!r})")
    return tcp_address(host, port)


def _split(text: str) -> tuple[str, str | None]:
    """Host without brackets, and the port if there is one. An IPv6 address without brackets has no port."""
    with suppress(ValueError):
        return str(ipaddress.IPv6Address(text)), None
    if text.startswith("["):
        host, _, rest = text[1:].partition("]")
        return host, rest.removeprefix(":") if rest else None
    host, colon, port = text.rpartition(":")
    return (host, port) if colon else (text, None)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and 0 < int(text) <= MAX_PORT


def _every_interface(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_unspecified
    return host == "*"
