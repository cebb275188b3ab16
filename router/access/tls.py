"""TLS of the gRPC listeners. New files serve new handshakes; connections that are open stay as they are."""

import ssl
import threading
from collections import OrderedDict
from pathlib import Path

import grpc

from router.access.reloading_file import ReloadingFile

MAX_PEERS = 65_536
"""Addresses that are remembered. One that comes back after so many others counts once more."""


class Handshakes:
    """How many began, and how many brought a call. gRPC tells Python nothing of one that fails: it is in the first
    number alone, and so is whoever connects and asks for nothing.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.used = 0
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, None] = OrderedDict()

    def begin(self) -> None:
        """In any thread."""
        with self._lock:
            self.begun += 1

    def use(self, peer: str) -> None:
        """A call came from this address. In the thread of the event loop."""
        if peer not in self._peers:
            self.used += 1
            if len(self._peers) >= MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers[peer] = None
        self._peers.move_to_end(peer)


class Certificates:
    """The server's chain and key, and where clients need a certificate, whose. PEM files.

    Raises OSError or ValueError for files that do not belong together.
    """

    def __init__(self, certificate: str, key: str, client_ca: str | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self.handshakes = Handshakes()
        self.files = ReloadingFile([path for path in (certificate, key, client_ca) if path], self._read)

    def credentials(self) -> grpc.ServerCredentials:
        """For one listener. Whoever shows no certificate of the client CA, where there is one, gets no connection."""
        given = self.files.value

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """At each handshake, in a thread of gRPC's: what is new."""
            nonlocal given
            self.handshakes.begin()
            if self.files.value is given:
                return None
            given = self.files.value
            return given

        needed = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(given, fetch, needed)  # type: ignore[arg-type]  # may give None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        # In this order: ssl would not say which file is missing.
        chain, key = Path(self._certificate).read_bytes(), Path(self._key).read_bytes()
        clients = None if self._client_ca is None else Path(self._client_ca).read_bytes()
        self._check()
        return grpc.ssl_server_certificate_configuration([(key, chain)], clients)

    def _check(self) -> None:
        """gRPC would say nothing of a key that is not the certificate's before somebody connects."""
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # A key with a password: without this somebody would be asked for it on the terminal.
            trial.load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            raise ValueError(f"{self._certificate} with {self._key}: {error}") from error
        if self._client_ca is not None:
            try:
                trial.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise ValueError(f"{self._client_ca}: {error}") from error
