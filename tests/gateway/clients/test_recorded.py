"""The bodies that real clients sent, recorded at a gateway: none of their fields is refused or unknown.

bodies.jsonl has one line per kind of request: the client with its version, the path, and the body.
"""

import json
from pathlib import Path

import pytest

from tests.fakes.gateway import running

BODIES = [json.loads(line) for line in (Path(__file__).parent / "bodies.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("sent", BODIES, ids=lambda sent: f"{sent['client']} {', '.join(sent['body'])}")
async def test_bodies_of_real_clients(address, script, sent):
    async with running(address, tool_parser="hermes") as gateway:
        answer = await gateway.post(sent["path"], **sent["body"])
        assert answer.status_code == 200, answer.text
        assert gateway.gateway.counters.unknown_fields == 0
    assert script.seen
