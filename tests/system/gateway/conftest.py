"""A real ring with an HTTP gateway, and OpenAI's client of it. Each module has its own ring."""

from collections.abc import Iterator

import pytest
from openai import OpenAI

from sluice.launch import Ring
from tests.fakes.ports import free_ports

USER = [{"role": "user", "content": "def fibonacci(n):"}]
SEEDED = {"model": "tiny", "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    """Two routers and a gateway."""
    port = free_ports(3)
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    with Ring(detokenizers=1, routers=2, port=port, http_port=port + 2, gateway_args=parsers) as ring:
        yield ring


@pytest.fixture(scope="module")
def url(ring) -> str:
    return f"http://{ring.http_address}/v1"


@pytest.fixture(scope="module")
def client(url) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
