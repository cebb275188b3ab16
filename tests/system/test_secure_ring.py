"""A ring that asks for certificates and tokens, as real processes, and everything that talks to it."""

import subprocess
import sys

import pytest

from sluice import Client
from sluice.client import Forbidden, TlsOptions, Unauthenticated, Unavailable
from sluice.launch import Ring
from tests.fakes.certificates import Authority

USER, CHIEF = "user-0123456789ab", "chief-0123456789"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ca")


def options(authority, pair):
    return TlsOptions(authority.certificate, pair.certificate, pair.key)


def test_certificates_and_tokens_together(authority, tmp_path):
    served, ours = authority.issue("server"), authority.issue("client")
    stranger = Authority(tmp_path, "other").issue("stranger")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{USER} team\n{CHIEF} operators admin\n")
    settings = {
        "tls_certificate": served.certificate,
        "tls_key": served.key,
        "tls_client_ca": authority.certificate,
        "tokens_file": tokens,
    }
    tls = options(authority, ours)
    with Ring(engines=1, detokenizers=1, router_args=settings) as ring:
        with Client(ring.address, tls=tls, token=USER, timeout=60) as client:
            assert client.generate("def f(x):", max_tokens=8).usage.completion_tokens
            with pytest.raises(Forbidden):
                client.stats()
        with Client(ring.address, tls=tls, timeout=60) as client, pytest.raises(Unauthenticated):
            client.generate("def f(x):", max_tokens=8)
        with (
            Client(ring.address, tls=options(authority, stranger), token=USER, timeout=10) as client,
            pytest.raises(Unavailable),
        ):
            client.generate("def f(x):", max_tokens=8)
        flags = ["--tls-ca", authority.certificate, "--tls-cert", ours.certificate, "--tls-key", ours.key]
        command = [sys.executable, "-m", "sluice", "stats", "--once", "--address", ring.address, "--token", CHIEF]
        told = subprocess.run([*command, *map(str, flags)], capture_output=True, text=True, timeout=60)
        assert told.returncode == 0, told.stderr
        assert "engine-0" in told.stdout
