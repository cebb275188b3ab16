"""Virtual machines: network namespaces on a bridge, with dnsmasq as the DNS of headless Services. Needs root."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

ETC = Path("/etc/netns")
"""`ip netns exec NAME` mounts the files in folder NAME over those in /etc."""
TOOLS = ("ip", "dnsmasq")
DNS_PORT = 53
DOMAIN = "ring.test"


def missing() -> str:
    """Why network namespaces cannot be used here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if absent := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(absent)}"
    probe = f"sluice-{secrets.token_hex(3)}"
    if subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode != 0:
        return "network namespaces are not permitted"
    ip("netns", "del", probe)
    return ""


def ip(*arguments: str) -> None:
    """Run the `ip` tool. Raises RuntimeError with its error message."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


class Machine:
    """A network namespace with one address, which can be disconnected and reconnected."""

    def __init__(self, network: "Network", number: int) -> None:
        self.ip = network.address(number)
        self._namespace = self._port = f"{network.name}-{number}"
        ip("netns", "add", self._namespace)
        ip("link", "add", self._port, "type", "veth", "peer", "name", "eth0", "netns", self._namespace)
        ip("link", "set", self._port, "master", network.name, "up")
        inside = ("-n", self._namespace)
        ip(*inside, "link", "set", "lo", "up")
        ip(*inside, "address", "add", f"{self.ip}/{network.prefix}", "dev", "eth0", *network.options)
        ip(*inside, "link", "set", "eth0", "up")
        self._files = ETC / self._namespace
        self._files.mkdir(parents=True)
        (self._files / "resolv.conf").write_text(f"nameserver {network.gateway}\n")
        # gloo listens at the address to which the host name resolves.
        (self._files / "hosts").write_text(f"127.0.0.1 localhost\n::1 localhost\n{self.ip} {socket.gethostname()}\n")

    @property
    def host(self) -> str:
        """The IP address as a part of URLs."""
        return f"[{self.ip}]" if ":" in self.ip else self.ip

    def run(self, command: Sequence[str], log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start a command on this machine, as the leader of a process group."""
        in_namespace = ["ip", "netns", "exec", self._namespace, *command]
        return subprocess.Popen(in_namespace, stdout=log, stderr=log, start_new_session=True)

    def unplug(self) -> None:
        # On the bridge: an interface that is set down inside the namespace would lose its IPv6 address.
        ip("link", "set", self._port, "down")

    def plug(self) -> None:
        ip("link", "set", self._port, "up")

    def remove(self) -> None:
        ip("link", "del", self._port)
        ip("netns", "del", self._namespace)
        shutil.rmtree(self._files)


class Dns:
    """A DNS server whose records change at any time and have no time to live. It can also stop answering."""

    def __init__(self, address: str, folder: Path) -> None:
        self._hosts = folder / "hosts"
        self._records: dict[str, tuple[str, ...]] = {}
        self._write()
        options = ["--keep-in-foreground", "--conf-file=/dev/null", "--pid-file=", "--user=root", "--no-resolv"]
        listen = [f"--port={DNS_PORT}", f"--listen-address={address}", "--bind-interfaces"]
        records = ["--no-hosts", f"--addn-hosts={self._hosts}", f"--local=/{DOMAIN}/"]
        self._process = subprocess.Popen(["dnsmasq", *options, *listen, *records])

    def set_records(self, records: Mapping[str, Sequence[str]]) -> None:
        """Set the addresses of these names. A name without addresses does not exist (NXDOMAIN)."""
        self._records |= {name: tuple(addresses) for name, addresses in records.items()}
        self._write()
        self._process.send_signal(signal.SIGHUP)

    def stop_answering(self) -> None:
        self._process.send_signal(signal.SIGSTOP)

    def resume_answering(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _write(self) -> None:
        named = ((address, name) for name, addresses in self._records.items() for address in addresses)
        self._hosts.write_text("".join(f"{address} {host_name(name)}\n" for address, name in named))


def host_name(name: str) -> str:
    return f"{name}.{DOMAIN}"


class Network:
    """A bridge with an address for this process and the DNS. It and its machines exist within the context."""

    def __init__(self, folder: Path, *, ipv6: bool = False) -> None:
        tag = secrets.token_bytes(2)
        self.name = f"sluice{tag.hex()}"
        # 198.18.0.0/15 is reserved for benchmarks (RFC 2544), fd00::/8 for private networks (RFC 4193).
        self._subnet = f"fd5c:1ce:{tag.hex()}::" if ipv6 else f"198.{18 + tag[0] % 2}.{tag[1]}."
        self.prefix = 64 if ipv6 else 24
        # Skips duplicate address detection, during which a new IPv6 address is not usable for seconds.
        self.options = ("nodad",) if ipv6 else ()
        self.gateway = self.address(1)
        self._folder = folder
        self._machines: list[Machine] = []

    def address(self, number: int) -> str:
        return f"{self._subnet}{number}"

    def machine(self) -> Machine:
        """Create a machine at an address that was not used before."""
        self._machines.append(Machine(self, 2 + len(self._machines)))
        return self._machines[-1]

    def __enter__(self) -> Self:
        ip("link", "add", self.name, "type", "bridge")
        ip("address", "add", f"{self.gateway}/{self.prefix}", "dev", self.name, *self.options)
        ip("link", "set", self.name, "up")
        self.dns = Dns(self.gateway, self._folder)
        return self

    def __exit__(self, *_: object) -> None:
        self.dns.close()
        for machine in self._machines:
            machine.remove()
        ip("link", "del", self.name)
