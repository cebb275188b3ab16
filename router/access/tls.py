"""TLS of the gRPC listeners. Reloaded certificates apply to new handshakes; open connections are not affected."""

import ssl
import threading
from collections import OrderedDict
from pathlib import Path

import grpc

from router.access.reloading_file import ReloadingFile

MAX_PEERS = 65_536
"""Client addresses that are remembered. An address that returns after this many others is counted again."""


class Handshakes:
    """Counts TLS handshakes and the connections that carried a call."""

    def __init__(self) -> None:
        # gRPC does not report failed handshakes to Python. A growing gap between these two counters means rejected
        # handshakes, or clients that connect without making a call.
        self.begun = 0
        self.used = 0
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, None] = OrderedDict()

    def begin(self) -> None:
        """Count a handshake. May be called from any thread."""
        with self._lock:
            self.begun += 1

    def use(self, peer: str) -> None:
        """Count a call's connection, once per address. Must be called from the event loop's thread."""
        if peer not in self._peers:
            self.used += 1
            if len(self._peers) >= MAX_PEERS:
                self._peers.popitem(last=False)
        self._peers[peer] = None
        self._peers.move_to_end(peer)


class Certificates:
    """PEM files of the server's certificate chain and key, and optionally of the CA that must sign client certificates.

    Raises OSError, or ValueError if the key does not match the certificate.
    """

    def __init__(self, certificate: str, key: str, client_ca: str | None) -> None:
        self._certificate = certificate
        self._key = key
        self._client_ca = client_ca
        self.handshakes = Handshakes()
        self.files = ReloadingFile([path for path in (certificate, key, client_ca) if path], self._read)

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for one listener. If there is a client CA, clients need a certificate that it has signed."""
        latest = self.files.value

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called by gRPC at each handshake, in one of its threads. None means unchanged."""
            nonlocal latest
            self.handshakes.begin()
            if self.files.value is latest:
                return None
            latest = self.files.value
            return latest

        required = self._client_ca is not None
        return grpc.dynamic_ssl_server_credentials(latest, fetch, required)  # type: ignore[arg-type]  # may return None

    def _read(self) -> grpc.ServerCertificateConfiguration:
        # Read the files before `_check`, because ssl's errors do not name a missing file.
        chain, key = Path(self._certificate).read_bytes(), Path(self._key).read_bytes()
        clients = None if self._client_ca is None else Path(self._client_ca).read_bytes()
        self._check()
        return grpc.ssl_server_certificate_configuration([(key, chain)], clients)

    def _check(self) -> None:
        # gRPC would only report a key that does not match the certificate at the first handshake.
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # Pass a password, so that OpenSSL does not prompt for one on the terminal if the key is encrypted.
            trial.load_cert_chain(self._certificate, self._key, password="")
        except ssl.SSLError as error:
            raise ValueError(f"{self._certificate} with {self._key}: {error}") from error
        if self._client_ca is not None:
            try:
                trial.load_verify_locations(self._client_ca)
            except ssl.SSLError as error:
                raise ValueError(f"{self._client_ca}: {error}") from error
