"""No log contains texts of callers, output or access tokens, even at the level `debug`."""

import contextlib

import pytest

from sluice import Client, SluiceError
from sluice.launch import Ring
from tests.fakes.processes import wait_until

CANARY = "quokka"
TOKEN = f"token-{CANARY}-0123456789"
OTHER = f"other-{CANARY}-0123456789"
DEBUG = {"log_level": "debug"}


@pytest.fixture
def logs(tmp_path):
    """All log lines of a ring, from its start to its end, with calls of every kind."""
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN} team admin\n")
    lines = []
    ring = Ring(
        engines=1,
        detokenizers=1,
        router_args={**DEBUG, "tokens_file": str(tokens)},
        engine_args=DEBUG,
        detokenizer_args=DEBUG,
        observe=lines.append,
    )
    with ring, Client(ring.address, token=TOKEN, timeout=60) as client:
        call(client)
        with contextlib.suppress(SluiceError), Client(ring.address, token=OTHER, timeout=60) as stranger:
            stranger.generate(CANARY)
        tokens.write_text(f"{OTHER}\n")

        def reloaded() -> bool:
            client.generate(CANARY, max_tokens=1)
            return any("file_reload_failed" in line.text for line in lines)

        assert wait_until(reloaded)
    return lines


def call(client):
    text = f"def {CANARY}(x):"
    client.generate(text, max_tokens=8, seed=1, logprobs=2, echo=True, stop=[CANARY], kv_cache={"salt": CANARY})
    client.generate([{"role": "user", "content": CANARY}], max_tokens=8)
    "".join(chunk.text for chunk in client.stream(text, max_tokens=300, n=2, request_id="r"))
    with client.stream(text, max_tokens=1500, ignore_eos=True, request_id="a") as stream:
        next(stream)
        client.abort("a", reason="enough")
        list(stream)
    tokens = client.tokenize(text, offsets=True)
    assert CANARY in client.detokenize(tokens.token_ids)
    for bad in (
        {"temperature": 9.0},
        {"stop": [CANARY * 1000]},
        {"guided": {"regex": f"{CANARY}("}},
        {"guided": {"json_schema": f"{{{CANARY}"}},
        {"model": CANARY},
        {"kv_cache": {"salt": CANARY * 100}},
        {"max_tokens": 10**6},
    ):
        with pytest.raises(SluiceError):
            client.generate(text, **bad)
    with pytest.raises(SluiceError):
        client.generate([{"role": CANARY, "content": CANARY}])
    with pytest.raises(SluiceError):
        client.generate([{"role": "user", "content": CANARY}], n=1000)


def test_logs_contain_no_text_of_callers_and_no_access_token(logs):
    events = [line.event for line in logs]
    assert {"ready", "request_ended", "abort_called", "stopped"} <= set(events)
    assert "file_reload_failed" in events
    assert [line.text for line in logs if CANARY in line.text.lower()] == []
