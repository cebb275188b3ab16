"""`sluice bench` with fake servers."""

import json

import grpc
import pytest
from google.rpc.error_details_pb2 import ErrorInfo

from tests.fakes import openai_server
from tests.fakes.failures import Failure

# Fields of a result file of `vllm bench serve` with its default metrics (v0.11 to v0.15).
VLLM_FIELDS = {
    "date", "endpoint_type", "backend", "label", "model_id", "num_prompts", "request_rate", "burstiness",
    "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms",
    "median_tpot_ms", "std_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p99_itl_ms",
    "mean_e2el_ms", "median_e2el_ms", "std_e2el_ms", "p99_e2el_ms",
}  # fmt: skip
DETAILS = {"input_lens", "output_lens", "ttfts", "itls", "start_times", "generated_texts", "errors"}


@pytest.fixture
def openai():
    return openai_server.Script()


@pytest.fixture
def http_address(openai):
    with openai_server.serve(openai) as address:
        yield address


def test_a_ring(sluice, address, script) -> None:
    result = sluice("bench", address, "--requests", "5", "--concurrency", "2", "--warmup", "1", "--json", "-")
    assert (result.exit_code, result.stderr) == (0, "")
    figures = json.loads(result.stdout)
    assert figures.keys() >= VLLM_FIELDS
    assert not figures.keys() & DETAILS
    assert (figures["completed"], figures["failed"], figures["model_id"], figures["backend"]) == (
        5,
        0,
        "tiny",
        "grpc",
    )
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (15, 15)
    assert figures["request_rate"] == "inf"
    specs = [request.spec for request in script.seen if hasattr(request, "spec")]
    assert len(specs) == 1 + 1 + 5
    assert all(spec.stopping.ignore_eos for spec in specs)
    assert len({spec.text for spec in specs}) == len(specs)


def test_an_openai_server(sluice, http_address, openai, tmp_path) -> None:
    file = tmp_path / "result.json"
    command = ["bench", http_address, "--api", "openai", "--chat", "--requests", "6", "--rate", "200"]
    command += ["--prompt-tokens", "40", "--output-tokens", "5", "--goodput", "ttft:600000", "--goodput", "e2el:600000"]
    result = sluice(*command, "--json", str(file), "--detailed", "--label", "here")
    assert result.exit_code == 0, result.stderr
    figures = json.loads(file.read_text())
    assert figures.keys() >= VLLM_FIELDS | DETAILS
    assert (figures["label"], figures["request_rate"], figures["num_prompts"]) == ("here", 200.0, 6)
    # The fake server counts two tokens per word.
    assert figures["input_lens"] == [40] * 6
    assert figures["output_lens"] == [5] * 6
    assert figures["request_goodput"] == pytest.approx(figures["request_throughput"])
    for expected in (f"small at {http_address}: 6 requests in", "time to first token", "goodput"):
        assert expected in result.stdout
    assert {len(body["messages"][0]["content"].split()) for body in openai.bodies[1:]} == {20}


def test_several_servers_take_turns(sluice, address, script, http_address, openai, tmp_path) -> None:
    file = tmp_path / "result.json"
    command = ["bench", f"ring={address}", f"other=http://{http_address}", "--requests", "4", "--rounds", "3"]
    result = sluice(*command, "--warmup", "1", "--goodput", "ttft:5000", "--json", str(file), "--detailed")
    assert result.exit_code == 0, result.stderr
    ring, http_server = json.loads(file.read_text())
    assert [(figures["server"], figures["backend"]) for figures in (ring, http_server)] == [
        ("ring", "grpc"),
        ("other", "openai"),
    ]
    assert (ring["num_prompts"], ring["completed"], len(ring["output_lens"])) == (12, 12, 12)
    for figures in (ring, http_server):
        assert figures.keys() >= VLLM_FIELDS | DETAILS
        rates = figures["output_throughput_of_rounds"]
        assert min(rates) < figures["output_throughput"] < max(rates)
    rows = [line.split() for line in result.stdout.splitlines() if line.strip()]
    assert rows[0] == ["ring", "other"]
    assert ["requests", "12", "12"] in rows
    # They may share an engine, so prompts must not be prefix cache hits of each other.
    ring_prompts = [request.spec.text for request in script.seen if hasattr(request, "spec")]
    http_prompts = [body["prompt"] for body in openai.bodies]
    assert len(ring_prompts) == len(http_prompts) == 1 + 1 + 12
    assert len({*ring_prompts[1:], *http_prompts[1:]}) == 2 * 13


def test_one_of_several_servers_completes_no_request(sluice, address, http_address, openai) -> None:
    openai.status, openai.fail_from = 503, 2
    result = sluice("bench", address, f"http://{http_address}", "--requests", "2", "--warmup", "0")
    assert result.exit_code == 1
    assert f"http://{http_address} failed: HTTP 503" in result.stderr
    assert ["failed", "0", "2"] in [line.split() for line in result.stdout.splitlines()]


QUICK = ("--requests", "1", "--warmup", "0")


def shown_tokens(script, openai) -> tuple[set, set]:
    """The Authorization headers that the ring and the OpenAI server received."""
    return {metadata.get("authorization") for metadata in script.metadata}, set(openai.tokens)


@pytest.mark.parametrize("server", ["ring", "other"])
@pytest.mark.parametrize("token", ["s3cret", "s3cret==", "here=s3cret"])
def test_the_token_of_a_single_server(monkeypatch, sluice, address, script, http_address, openai, server, token):
    server_address = {"ring": address, "other": f"http://{http_address}"}[server]
    monkeypatch.setenv("SLUICE_TOKEN", token)
    assert sluice("bench", f"here={server_address}", *QUICK).exit_code == 0
    expected = {f"Bearer {token.removeprefix('here=')}"}
    assert shown_tokens(script, openai) == ((expected, set()) if server == "ring" else (set(), expected))


def test_a_token_is_sent_only_to_the_server_that_it_names(sluice, address, script, http_address, openai):
    servers = [f"ring={address}", f"other=http://{http_address}"]
    assert sluice("bench", *servers, *QUICK, "--token", "ring=s3cret").exit_code == 0
    assert shown_tokens(script, openai) == ({"Bearer s3cret"}, {None})
    assert sluice("bench", *servers, *QUICK, "--token", "ring=s3cret", "--token", "other=their=s").exit_code == 0
    assert shown_tokens(script, openai) == ({"Bearer s3cret"}, {None, "Bearer their=s"})


def test_tokens_of_several_servers_in_the_environment(monkeypatch, sluice, address, script, http_address, openai):
    monkeypatch.setenv("SLUICE_TOKEN", "ring=s3cret other=theirs")
    assert sluice("bench", f"ring={address}", f"other=http://{http_address}", *QUICK).exit_code == 0
    assert shown_tokens(script, openai) == ({"Bearer s3cret"}, {"Bearer theirs"})


def test_a_token_without_a_server_is_refused_for_several_servers(
    monkeypatch, sluice, address, script, http_address, openai
):
    monkeypatch.setenv("SLUICE_TOKEN", "s3cret")
    result = sluice("bench", f"ring={address}", f"other=http://{http_address}", *QUICK)
    assert result.exit_code == 2
    assert "give NAME=TOKEN, where NAME is one of ring, other" in " ".join(result.stderr.replace("│", " ").split())
    assert "s3cret" not in result.stderr
    assert shown_tokens(script, openai) == (set(), set())


def test_chats_of_a_ring(sluice, address, script) -> None:
    assert sluice("bench", address, "--chat", "--requests", "1", "--warmup", "0").exit_code == 0
    specs = [request.spec for request in script.seen if hasattr(request, "spec")]
    assert [message.role for spec in specs for message in spec.chat.messages] == ["user", "user"]


def test_failures_are_counted_and_shown(sluice, http_address, openai) -> None:
    openai.status, openai.fail_from = 503, 6
    result = sluice("bench", http_address, "--api", "openai", "--requests", "8", "--warmup", "0", "--concurrency", "1")
    assert result.exit_code == 0
    assert "4 requests, 4 failed" in result.stdout
    assert result.stderr.count(f"{http_address} failed: HTTP 503") == 3
    assert "and 1 more" in result.stderr


def test_concurrency_is_limited(sluice, http_address, openai) -> None:
    openai.pause = 0.002
    result = sluice("bench", http_address, "--api", "openai", "--requests", "9", "--concurrency", "3", "--json", "-")
    assert openai.max_in_flight == 3
    assert json.loads(result.stdout)["max_concurrent_requests"] <= 3


def test_a_server_that_refuses_everything(sluice, address, script) -> None:
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE, "no engine", (ErrorInfo(reason="NO_ENGINE"),))
    result = sluice("bench", address)
    assert result.exit_code == 1
    assert "no engine" in result.stderr


@pytest.mark.parametrize("form", ["127.0.0.1:1", "http://127.0.0.1:1"])
def test_an_unreachable_server_is_named(sluice, address, form) -> None:
    result = sluice("bench", address, f"other={form}", "--requests", "1", "--warmup", "0")
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert f"server answers at {form}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--api", "openai"], "needs the ADDRESS"),
        (["a:1,b:1", "--api", "openai"], "must have one address"),
        (["x=http://a:1,b:1"], "must have one address"),
        (["a:1", "http://a:1", "a:1"], "two servers are called a:1"),
        (["x=a:1", "x=b:1"], "two servers are called x"),
        (["a:1", "http://a:1", "--tenant", "t"], "--tenant is only supported with --api grpc"),
        (["x=a:1", "y=b:1", "--token", "x=1", "--token", "x=2"], "--token: x has two tokens"),
        (["--goodput", "itl:5"], "--goodput itl:5"),
        (["--goodput", "ttft:soon"], "--goodput ttft:soon"),
        (["--goodput", "ttft:-1"], "--goodput ttft:-1"),
        (["--percentiles", "101"], "--percentiles 101"),
        (["--percentiles", "x"], "--percentiles x"),
        (["--requests", "0"], "--requests"),
    ],
)
def test_invalid_arguments_are_refused(sluice, arguments, message) -> None:
    result = sluice("bench", *arguments)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_a_mistake_in_a_file_is_reported(sluice, address, tmp_path) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text('{"promt": "x"}')
    result = sluice("bench", address, "--file", str(file))
    assert result.exit_code == 1
    assert "line 1: unknown fields promt" in result.stderr.replace("\n", "")
