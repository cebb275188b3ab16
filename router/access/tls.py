"""TLS of the gRPC listeners. Reloaded files apply to new handshakes; open connections keep theirs."""

import ssl
import threading
from collections import OrderedDict
from pathlib import Path

import grpc

from router.access.reloading_file import ReloadingFile

MAX_PEERS = 65_536
"""Addresses remembered. An address that returns after that many others is counted again."""


class Handshakes:
    """Counts TLS handshakes, and the connections that carried a call."""

    def __init__(self) -> None:
        # gRPC does not report failed handshakes to Python: a growing gap between these two means rejected handshakes,
        # or clients that connect and send nothing.
        self.begun = 0
        self.used = 0
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, None] = OrderedDict()

    def begin(self) -> None:
        """Called in any thread."""
        with self._lock:
            self.begun += 1

    def use(self, peer: str) -> None:
        """Count a call's connection, once per address. Called in the event loop's thread."""
        if peer not in self._peers:
            self.used += 1
            if len(self._peers) >= MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers[peer] = None
        self._peers.move_to_end(peer)


class Certificates:
    """The server's certificate chain and key, and the CA of client certificates if clients need one. PEM files.

    Raises OSError, or ValueError if the key does not fit the certificate.
    """

    def __init__(self, certificate: str, key: str, client_ca: str | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self.handshakes = Handshakes()
        self.files = ReloadingFile([path for path in (certificate, key, client_ca) if path], self._read)

    def credentials(self) -> grpc.ServerCredentials:
        """For one listener. With a client CA, a client without a certificate of it cannot connect."""
        given = self.files.value

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """gRPC calls this at each handshake, in a thread of its own; None: unchanged."""
            nonlocal given
            self.handshakes.begin()
            if self.files.value is given:
                return None
            given = self.files.value
            return given

        needed = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(given, fetch, needed)  # type: ignore[arg-type]  # may give None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        # Before `_check`, since ssl's errors do not name the missing file.
        chain, key = Path(self._certificate).read_bytes(), Path(self._key).read_bytes()
        clients = None if self._client_ca is None else Path(self._client_ca).read_bytes()
        self._check()
        return grpc.ssl_server_certificate_configuration([(key, chain)], clients)

    def _check(self) -> None:
        # gRPC would not report a key that does not fit the certificate before the first handshake.
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Without a password here, OpenSSL would prompt on the terminal for that of an encrypted key.
            trial.load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            raise ValueError(f"{self._certificate} with {self._key}: {error}") from error
        if self._client_ca is not None:
            try:
                trial.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise ValueError(f"{self._client_ca}: {error}") from error
