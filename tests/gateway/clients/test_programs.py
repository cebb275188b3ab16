"""Programs of other people's clients against the gateway of a real model: each check of each program passes.

The programs are in `programs`, one per client, and each runs in an environment of its own, because clients need
different versions of the same packages.
"""

import os
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sluice.launch import Ring
from tests.fakes.ports import free_ports
from tests.gateway.clients.environment import npm_environment, plain_environment, run

pytestmark = [pytest.mark.process, pytest.mark.long, pytest.mark.timeout(900)]

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
NAME = "smollm2"


class Client(NamedTuple):
    program: str
    packages: tuple[str, ...]
    checks: int


CLIENTS = {
    "openai": Client("with_openai.py", ("openai==3.57.0",), 23),
    "LangChain": Client("with_langchain.py", ("langchain-openai==1.7.4", "openai==3.57.0"), 22),
    "LiteLLM": Client("with_litellm.py", ("litellm==1.110.2", "openai==3.57.0"), 23),
    "instructor": Client("with_instructor.py", ("instructor==1.17.0", "openai==3.3.0"), 12),
    "pydantic-ai": Client("with_pydantic_ai.py", ("pydantic-ai-slim[openai]==2.68.0", "openai==3.57.0"), 16),
}
AI_SDK = ("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "zod@4.6.7")
AI_SDK_CHECKS = 35


@pytest.fixture(scope="module")
def ring(real_model) -> Iterator[Ring]:
    """In int8, with a chat template that writes tools. Objects of JSON schemas are closed, since to open ones a small
    model adds properties until `max_tokens`."""
    pytest.importorskip("openvino")
    port = free_ports(6)
    engine = {"backend": "openvino", "quantize": "int8", "guided_closed_objects": True}
    options = {
        "detokenizers": 1,
        "metrics_port": port + 2,
        "engine_args": engine,
        "router_args": {"chat_template": str(HERE / "tools.jinja")},
        "gateway_args": {"tool_parser": "hermes"},
    }
    with Ring(str(real_model), name=NAME, port=port, http_port=port + 1, **options) as ring:
        yield ring


@pytest.fixture(autouse=True)
def _every_field_is_known(ring) -> Iterator[None]:
    """No client sends a field that the gateway ignores because it does not know it."""
    before = unknown_fields(ring)
    yield
    assert unknown_fields(ring) == before


def unknown_fields(ring: Ring) -> float:
    # The gateway's port follows those of the router, the engine and the detokenizer.
    with urllib.request.urlopen(f"http://127.0.0.1:{ring.plan.metrics_port + 3}/metrics", timeout=60) as page:
        families = text_string_to_metric_families(page.read().decode())
        return next(family.samples[0].value for family in families if family.name == "sluice_gateway_unknown_fields")


def lines(ring: Ring, command: list[str | Path], **variables: str) -> list[str]:
    """What a program writes about its checks."""
    written = run([*command, f"http://{ring.http_address}/v1", NAME], **variables)
    return [line for line in written.splitlines() if line.startswith(("ok ", "failed "))]


def check(found: list[str], checks: int) -> None:
    failed = [line for line in found if not line.startswith("ok ")]
    assert not failed, "\n".join(failed)
    assert len(found) == checks


@pytest.mark.parametrize("name", CLIENTS)
def test_client_of_python(ring, name):
    client = CLIENTS[name]
    python = plain_environment(f"client-{name.lower()}", *client.packages) / "python"
    # LiteLLM would ask a server for the prices of models.
    check(lines(ring, [python, PROGRAMS / client.program], LITELLM_LOCAL_MODEL_COST_MAP="True"), client.checks)


def test_vercels_ai_sdk(ring, tmp_path):
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("node and npm are not installed")
    # A program finds its packages beside itself.
    os.symlink(npm_environment("client-ai-sdk", *AI_SDK) / "node_modules", tmp_path / "node_modules")
    program = shutil.copy(PROGRAMS / "with_ai_sdk.mjs", tmp_path)
    check(lines(ring, [node, program]), AI_SDK_CHECKS)
