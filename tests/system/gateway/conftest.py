"""A real ring with an HTTP gateway, for the tests of the gateway."""

from sluice.launch import Ring
from tests.fakes.ports import free_ports

USER = [{"role": "user", "content": "def fibonacci(n):"}]
SEEDED = {"model": "tiny", "seed": 7, "max_tokens": 24}


def ring_with_gateway() -> Ring:
    """Two routers and a gateway, not started yet."""
    port = free_ports(3)
    parsers = {"tool_parser": "hermes", "reasoning_parser": "qwen3"}
    return Ring(detokenizers=1, routers=2, port=port, http_port=port + 2, gateway_args=parsers)
