"""A real ring that requires certificates and bearer tokens, with every kind of client."""

import ssl
import subprocess
import sys

import httpx
import pytest
from openai import AuthenticationError, OpenAI

from sluice import Client
from sluice.client import Forbidden, TlsOptions, Unauthenticated, Unavailable
from sluice.launch import Ring
from tests.fakes.certificates import Authority
from tests.fakes.ports import free_ports

USER, CHIEF = "user-0123456789ab", "chief-0123456789"


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path, "ca")


def options(authority, pair):
    return TlsOptions(authority.certificate, pair.certificate, pair.key)


def test_certificates_and_tokens_are_both_required(authority, tmp_path):
    served, client_certificate = authority.issue("server"), authority.issue("client")
    stranger = Authority(tmp_path, "other").issue("stranger")
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{USER} team\n{CHIEF} operators admin\n")
    settings = {
        "tls_certificate": served.certificate,
        "tls_key": served.key,
        "tls_client_ca": authority.certificate,
        "tokens_file": tokens,
    }
    tls = options(authority, client_certificate)
    port = free_ports(2)
    gateway = {
        "router_ca": authority.certificate,
        "router_certificate": client_certificate.certificate,
        "router_key": client_certificate.key,
    }
    ports = {"port": port, "http_port": port + 1}
    with Ring(engines=1, detokenizers=1, router_args=settings, gateway_args=gateway, **ports) as ring:
        with Client(ring.address, tls=tls, token=USER, timeout=60) as client:
            assert client.generate("def f(x):", max_tokens=8).usage.completion_tokens
            with pytest.raises(Forbidden):
                client.stats()
        with Client(ring.address, tls=tls, timeout=60) as client, pytest.raises(Unauthenticated):
            client.generate("def f(x):", max_tokens=8)
        with (
            Client(ring.address, tls=options(authority, stranger), token=USER, timeout=60) as client,
            pytest.raises(Unavailable),
        ):
            client.generate("def f(x):", max_tokens=8)
        trusted = ssl.create_default_context(cafile=authority.certificate)
        base_url, spec = f"https://{ring.http_address}/v1", {"model": "", "prompt": "def f(x):", "max_tokens": 8}
        with OpenAI(base_url=base_url, api_key=USER, http_client=httpx.Client(verify=trusted)) as http:
            assert http.completions.create(**spec).usage.completion_tokens
            assert list(http.completions.create(**spec, stream=True))
            with pytest.raises(AuthenticationError):
                http.with_options(api_key="unknown-0123456789").completions.create(**spec)
        flags = [
            "--tls-ca",
            authority.certificate,
            "--tls-cert",
            client_certificate.certificate,
            "--tls-key",
            client_certificate.key,
        ]
        command = [sys.executable, "-m", "sluice", "stats", "--once", "--address", ring.address, "--token", CHIEF]
        done = subprocess.run([*command, *map(str, flags)], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        assert "engine-0" in done.stdout
