"""Certificates for tests, created by the `openssl` program."""

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import grpc

NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
NAMES = "subjectAltName=DNS:localhost,IP:127.0.0.1"


@dataclass(frozen=True)
class Pair:
    """PEM files of a certificate and its private key."""

    certificate: Path
    key: Path

    def copy_to(self, other: "Pair") -> None:
        """Replace another pair's files, as a renewal does: the key first."""
        shutil.copy(self.key, other.key)
        shutil.copy(self.certificate, other.certificate)


class Authority:
    """A certificate authority."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder = folder
        self.certificate = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        self._openssl("req", "-x509", *NEW_KEY, "-keyout", self._key, "-out", self.certificate, "-subj", f"/CN={name}")

    def issue(self, name: str) -> Pair:
        """A certificate with common name `name`, valid for 127.0.0.1 and localhost."""
        pair = Pair(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        request, names = self.folder / f"{name}.csr", self.folder / f"{name}.names"
        names.write_text(NAMES)
        self._openssl("req", *NEW_KEY, "-keyout", pair.key, "-out", request, "-subj", f"/CN={name}")
        issuer = ("-CA", self.certificate, "-CAkey", self._key, "-CAcreateserial")
        self._openssl("x509", "-req", "-in", request, *issuer, "-extfile", names, "-out", pair.certificate)
        return pair

    def channel(self, port: int, client: Pair | None = None) -> grpc.aio.Channel:
        """A client's channel that trusts this authority and shares no connection with other channels."""
        credentials = grpc.ssl_channel_credentials(
            self.certificate.read_bytes(),
            client and client.key.read_bytes(),
            client and client.certificate.read_bytes(),
        )
        return grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, [("grpc.use_local_subchannel_pool", 1)])

    def _openssl(self, *arguments: str | Path) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
