"""The ring's keys, which determine which role may send to which: a CURVE key pair per role, in a folder of text files.

    FOLDER/secret/engine.key    one key, which only engines may read
    FOLDER/public/engine.key    one key per line, the newest first; two keys during a rotation

A service needs the secret key of its role and all of `public`. Keys are CURVE25519 in Z85 (rfc.zeromq.org/spec/26, 32).
"""

import os
import re
import secrets
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, get_args

import structlog
import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

Role = Literal["router", "engine", "detok"]
ROLES: tuple[Role, ...] = get_args(Role)
SENDERS: dict[Role, tuple[Role, ...]] = {
    "router": ("detok", "engine"),
    "engine": ("router",),
    "detok": ("engine", "router"),
}
"""For each role, the roles whose keys its inbox admits."""
KEY = re.compile(rb"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}")
KEYS_SECONDS = 1.0
"""Interval of the checks for changed key files, so that keys can be replaced without a restart."""
OTHERS = 0o007
"""Permission bits of a file for users outside its group."""
ZAP_ADDRESS = "inproc://zeromq.zap.01"
ZAP_DOMAIN = b"sluice"
WARN_SECONDS = 10.0
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Events of a refused connection: no CURVE handshake, one for another inbox's key, or a key that is not admitted."""


class KeysError(ValueError):
    """A key file is missing, unreadable or malformed."""


class InsecureError(ValueError):
    """An address that must not be used without keys, or at all."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A key pair, both keys in Z85."""

    public: bytes
    secret: bytes


class Keys:
    """The keys that one service may read. Thread-safe. Raises KeysError if a key is missing at the start.

    Files are read whenever a key is needed, so changes take effect immediately. While a file is unreadable, its former
    content stays in effect.
    """

    def __init__(self, folder: Path, role: Role, senders: tuple[Role, ...] | None = None) -> None:
        """`senders`: the roles whose keys the service admits. Default: those whose messages an inbox of this role
        receives."""
        self.role = role
        self._senders = SENDERS[role] if senders is None else senders
        self._folder = folder
        self._own = _read_secret(folder, role)
        self._public = {other: _read(_public(folder, other)) for other in ROLES}
        self._unreadable: set[Role | None] = set()
        """Roles whose public keys, or None for the secret key, have been logged as unreadable."""
        if self._own.public not in self._public[role]:
            raise KeysError(f"{_secret(folder, role)} does not belong to any key in {_public(folder, role)}")

    @property
    def own(self) -> KeyPair:
        """The key pair of the service's role."""
        try:
            self._own = _read_secret(self._folder, self.role)
            self._unreadable.discard(None)
        except KeysError as error:
            self._warn(None, error)
        return self._own

    def public(self, role: Role) -> tuple[bytes, ...]:
        """The public keys of a role, the newest first."""
        try:
            self._public[role] = _read(_public(self._folder, role))
            self._unreadable.discard(role)
        except KeysError as error:
            self._warn(role, error)
        return self._public[role]

    def admits(self, key: bytes) -> Role | None:
        """The role that this public key belongs to. None unless that role may send to this service."""
        return next((role for role in self._senders if key in self.public(role)), None)

    def _warn(self, role: Role | None, error: KeysError) -> None:
        """Log once that a file is unreadable. `role` as in `_unreadable`."""
        if role not in self._unreadable:
            self._unreadable.add(role)
            structlog.get_logger().warning("key_file_unreadable", error=str(error))


@dataclass(frozen=True, slots=True)
class Security:
    """How a process protects its lanes and inbox.

    Without keys, only ipc addresses may be used, whose files are private to the user, unless `insecure` is set.
    """

    keys: Keys | None = None
    insecure: bool = False
    peer: Role | None = None
    """Role at the other end of a lane."""

    def to(self, peer: Role) -> "Security":
        """The security of a lane to a service of this role."""
        return replace(self, peer=peer)

    def check(self, address: str) -> None:
        """Raises InsecureError unless this address may be used."""
        if not address.startswith(("ipc://", "tcp://", "dns:")):
            raise InsecureError(f"{address!r} must be tcp://host:port or ipc:///path")
        is_reachable = not address.startswith("ipc://") or address.startswith("ipc://@")
        if is_reachable and self.keys is None and not self.insecure:
            raise InsecureError(
                f"{address} can be reached by other users or machines: create keys (sluice keygen FOLDER) and set "
                "--keys FOLDER or, if you trust every host on the network, set --insecure-ring"
            )


PLAIN = Security()


def has_key(folder: Path, role: Role) -> bool:
    """Whether the folder has a public or a secret key of this role."""
    return _public(folder, role).exists() or _secret(folder, role).exists()


def public_keys(folder: Path) -> dict[Role, tuple[bytes, ...]]:
    """The public keys of all roles, from a folder of keys or of public keys (a mounted Secret). Raises KeysError."""
    files = folder / "public" if (folder / "public").is_dir() else folder
    return {role: _read(files / f"{role}.key") for role in ROLES}


def generate(folder: Path, role: Role) -> None:
    """Create a new pair for a role. Its former public key stays valid as the second one. Raises OSError, KeysError."""
    public, secret = zmq.curve_keypair()
    former = _read(_public(folder, role))[:1] if _public(folder, role).exists() else ()
    for file in (_public(folder, role), _secret(folder, role)):
        file.parent.mkdir(parents=True, exist_ok=True)
    _secret(folder, role).parent.chmod(0o700)
    # Peers must know the new public key before a service uses the secret one.
    _write(_public(folder, role), (public, *former), 0o644)
    _write(_secret(folder, role), (secret,), 0o600)


def retire(folder: Path, role: Role) -> None:
    """End a rotation, so that only the newest public key stays valid. Raises OSError, KeysError.

    It is an error if there is no former key, or if the role's secret key does not belong to the newest public key.
    """
    file = _public(folder, role)
    newest = newest_of_two(_read(file), str(file))
    if _secret(folder, role).exists() and _read_secret(folder, role).public != newest:
        raise KeysError(f"{_secret(folder, role)} does not belong to the newest key in {file}: nothing was removed")
    _write(file, (newest,), 0o644)


def newest_of_two(keys: tuple[bytes, ...], location: str) -> bytes:
    """The newest key. Raises KeysError, which names `location`, if there is no former key."""
    if len(keys) < 2:
        raise KeysError(f"{location} contains one key: there is no former key to remove")
    return keys[0]


def _secret(folder: Path, role: Role) -> Path:
    return folder / "secret" / f"{role}.key"


def _public(folder: Path, role: Role) -> Path:
    return folder / "public" / f"{role}.key"


def _read_secret(folder: Path, role: Role) -> KeyPair:
    file = _secret(folder, role)
    keys = _read(file, forbidden=OTHERS)
    if len(keys) != 1:
        raise KeysError(f"{file} must contain one key (got {len(keys)})")
    return KeyPair(zmq.curve_public(keys[0]), keys[0])


def _read(file: Path, forbidden: int = 0) -> tuple[bytes, ...]:
    """The keys in a file. Raises KeysError, also if the file has one of the `forbidden` permission bits."""
    try:
        lines = tuple(file.read_bytes().split())
        if file.stat().st_mode & forbidden:
            raise KeysError(f"{file} is accessible to all users: chmod o= {file}")
    except OSError as error:
        raise KeysError(f"cannot read {file}: {error.strerror}") from error
    if not lines or not all(map(KEY.fullmatch, lines)):
        raise KeysError(f"{file} must contain keys of 40 characters, one per line")
    return lines


def _write(file: Path, keys: tuple[bytes, ...], mode: int) -> None:
    """Replace the file atomically, so that readers see the old or the new content."""
    new_file = file.with_suffix(".new")
    new_file.unlink(missing_ok=True)
    with os.fdopen(os.open(new_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as stream:
        stream.write(b"\n".join(keys) + b"\n")
    new_file.replace(file)


class ZapHandler(threading.Thread):
    """Admits known keys to an inbox and counts refusals (ZAP, rfc.zeromq.org/spec/27) while the inbox's socket is open.

    Raises ZMQError if the context already has a handler.
    """

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", socket: "zmq.Socket[bytes]", keys: Keys) -> None:
        super().__init__(name="zap", daemon=True)
        self.refused = 0
        self._keys = keys
        self._warned_at = -WARN_SECONDS
        self._log = structlog.get_logger()
        self._zap = context.socket(zmq.REP)
        self._zap.set(zmq.LINGER, 0)
        try:
            self._zap.bind(ZAP_ADDRESS)
        except zmq.ZMQError:
            self._zap.close()
            raise
        socket.set(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
        # ZeroMQ's default name contains a descriptor number, which may be reused before the name is free.
        address = f"inproc://monitor.{secrets.token_hex(8)}"
        self._events = socket.get_monitor_socket(REFUSED | zmq.EVENT_MONITOR_STOPPED, address)
        self.start()

    def run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._events, zmq.POLLIN)
        live = True
        while live:
            for socket, _ in poller.poll():
                if socket is self._zap:
                    self._answer(*self._zap.recv_multipart())
                else:
                    live = self._count_refusal()
        # Closing the socket alone would release the address only some time later.
        self._zap.unbind(ZAP_ADDRESS)
        self._zap.close()
        self._events.close()

    def _answer(self, version: bytes, number: bytes, *request: bytes) -> None:
        """Admit or refuse a connection. `request`: domain, address, identity, mechanism, credentials."""
        mechanism, key = request[3], request[-1]
        role = self._keys.admits(z85.encode(key)) if mechanism == b"CURVE" and len(key) == 32 else None
        verdict = (b"200", b"OK", role.encode()) if role else (b"400", b"unknown key", b"")
        self._zap.send_multipart([version, number, *verdict, b""])

    def _count_refusal(self) -> bool:
        """Count a refusal. Returns False once the socket has been closed."""
        event = int(parse_monitor_message(self._events.recv_multipart())["event"])
        if event == zmq.EVENT_MONITOR_STOPPED:
            return False
        self.refused += 1
        if time.monotonic() - self._warned_at >= WARN_SECONDS:
            self._warned_at = time.monotonic()
            reason = "unknown key" if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH else "no key, or a key of another ring"
            self._log.warning("peers_refused", count=self.refused, latest=reason)
        return True
