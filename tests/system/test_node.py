"""The examples in Node, which are built from the exported .proto files alone."""

import json
import os
import re
import shutil
import subprocess
from collections import deque
from pathlib import Path

import grpc
import numpy as np
import pytest
from typer.testing import CliRunner

from sluice import Client
from sluice.cli.commands import app
from sluice.launch import Ring
from tests.fakes import processors_page
from tests.fakes.breaking_routers import GONE, Plan, bare, run_routers, with_reason

ROOT = Path(__file__).parents[2]
EXAMPLE, DOCS = ROOT / "examples" / "node", ROOT / "docs"

pytestmark = [
    pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="needs node and npm"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def example(tmp_path_factory) -> Path:
    """The folder of the examples, installed as their README says."""
    folder = tmp_path_factory.mktemp("node")
    for name in ("package.json", "package-lock.json", "generate.mjs", "cache_events.mjs"):
        shutil.copy(EXAMPLE / name, folder)
    assert CliRunner().invoke(app, ["protos", "export", str(folder / "protos")]).exit_code == 0
    install = ["npm", "ci", "--ignore-scripts", "--prefer-offline", "--no-audit", "--no-fund"]
    subprocess.run(install, cwd=folder, check=True, capture_output=True, timeout=200)
    return folder


def run(example: Path, address: str, prompt: str, spec: dict) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["node", "generate.mjs", prompt, json.dumps(spec)],
        cwd=example,
        env={**os.environ, "SLUICE_ADDRESS": address},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_example_prints_the_completion(ring, example) -> None:
    prompt = "def fibonacci(n):"
    with Client(ring.address) as client:
        expected = client.generate(prompt, temperature=0, max_tokens=32).text
    done = run(example, ring.address, prompt, {"sampling": {"temperature": 0}, "stopping": {"max_tokens": 32}})
    assert (done.returncode, done.stderr, done.stdout) == (0, "", expected + "\n")


def spec_of(page: str) -> dict:
    """The request in the Node command on a page of the documentation."""
    (text,) = re.findall(r"^node generate.mjs '[^']*' '(.*?)'", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE)
    return json.loads(text)


def test_the_call_in_guided_md(ring, example) -> None:
    done = run(example, ring.address, "Is a whale a fish? ", spec_of("guided.md"))
    assert (done.returncode, done.stdout) in ((0, "yes\n"), (0, "no\n"))


def test_the_call_in_beams_md(ring, example) -> None:
    with Client(ring.address) as client:
        expected = client.generate("import os", beam_search={"width": 4}, max_tokens=24).text
    done = run(example, ring.address, "import os", spec_of("beams.md"))
    assert (done.returncode, done.stderr, done.stdout) == (0, "", expected + "\n")


@pytest.mark.long
def test_the_call_in_speculation_md(ring, example) -> None:
    greedy = {"sampling": {"temperature": 0}, "stopping": {"max_tokens": 32}}
    plain = run(example, ring.address, "def add_one(x):", greedy)
    assert run(example, ring.address, "def add_one(x):", spec_of("speculation.md") | greedy).stdout == plain.stdout


@pytest.mark.long
def test_the_call_in_processors_md(example, tmp_path, monkeypatch) -> None:
    module, settings = processors_page.example()
    (tmp_path / "digits.py").write_text(module)
    (tmp_path / "engine.yaml").write_text(settings)
    monkeypatch.chdir(tmp_path)
    with Ring(engines=1, detokenizers=1, engine_args={"config": tmp_path / "engine.yaml"}) as ring:
        done = run(example, ring.address, "x = ", spec_of("processors.md"))
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch("[0-9]{8}\n", done.stdout)


def test_the_call_in_prompt_logprobs_md(ring, example) -> None:
    done = run(example, ring.address, "def add(a, b):", spec_of("prompt_logprobs.md"))
    assert done.returncode == 0
    rows = [row.split("\t") for row in done.stderr.splitlines()]
    assert "".join(json.loads(row[2]) for row in rows) == "def add(a, b):"
    assert rows[0][:2] == ["", ""]
    with Client(ring.address) as client:
        expected = client.generate("def add(a, b):", prompt_logprobs=1, max_tokens=1).prompt_logprobs
    assert [float(row[0]) for row in rows[1:]] == [pytest.approx(entry.logprob, abs=2e-3) for entry in expected[1:]]


def test_the_call_in_tensors_md(ring, example) -> None:
    done = run(example, ring.address, "def add(a, b):", spec_of("tensors.md"))
    assert done.returncode == 0
    rows = re.findall(r"^0 generation_logits: rows (\d) to (\d), each float32 \[\d{4}\]$", done.stderr, re.MULTILINE)
    assert [int(first) for first, _ in rows] == [0, *(int(last) + 1 for _, last in rows[:-1])]
    assert rows[-1][1] == "3"


def test_the_call_in_prompt_tables_md(ring, example) -> None:
    with Client(ring.address) as client:
        (model,) = client.models()
        rows = np.random.default_rng(0).normal(0, 0.5, (8, model.hidden_size)).astype(np.float32)
        client.load_prompt_adapter("terse", rows=rows)
        greedy = {"temperature": 0, "max_tokens": 16}
        expected, plain = (
            client.generate("import os", prompt_adapter_id=name, **greedy).text for name in ("terse", "")
        )
        spec = spec_of("prompt_tables.md") | {"sampling": {"temperature": 0}, "stopping": {"max_tokens": 16}}
        done = run(example, ring.address, "import os", spec)
        client.unload_prompt_adapter("terse")
    assert (done.returncode, done.stderr, done.stdout) == (0, "", expected + "\n")
    assert expected != plain


@pytest.mark.long
def test_cache_events_are_printed(example) -> None:
    with Ring(detokenizers=1, engine_args={"kv_event_buffer": 100, "tokens_per_block": 16}) as ring:
        with Client(ring.address) as client:
            client.generate(list(range(40)), max_tokens=1)
        done = subprocess.run(
            ["node", "cache_events.mjs", "3"],
            cwd=example,
            env={**os.environ, "SLUICE_ADDRESS": ring.address},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
    created, *stored = map(json.loads, done.stdout.splitlines())
    assert (created["engine_id"], created["event_id"], "created" in created) == ("engine-0", "0", True)
    assert [event["stored"]["token_ids"] for event in stored] == [[*range(16)], [*range(16, 32)]]
    assert stored[1]["stored"]["parent_hash"] == stored[0]["stored"]["block_hash"]


def test_a_resumed_stream_repeats_no_tensor_row(example) -> None:
    tensors = {"context_logits": True, "tensors": [{"name": "a"}]}
    plan = Plan(deque([(4, GONE), (5, GONE), (2, GONE), (6, GONE)]))
    with run_routers(2, plan) as addresses:
        done = run(example, ",".join(addresses), "p", {"stopping": {"max_tokens": 9}, "n": 2, "output": tensors})
    assert (done.returncode, len(plan.seen)) == (0, 5)
    rows: dict[str, list[int]] = {}
    for key, first, last in re.findall(r"^(.*): rows (\d+) to (\d+), ", done.stderr, re.MULTILINE):
        rows.setdefault(key, []).extend(range(int(first), int(last) + 1))
    assert rows == {"prompt context_logits": [*range(5)], "0 a": [*range(9)], "1 a": [*range(10)]}


def test_a_stream_is_resumed_at_the_next_router(example) -> None:
    spec = {"stopping": {"max_tokens": 9}, "output": {"echo": True}}
    busy = with_reason(grpc.StatusCode.ALREADY_EXISTS, "DUPLICATE_REQUEST")
    plan = Plan()
    with run_routers(2, plan) as addresses:
        undisturbed = run(example, ",".join(addresses), "p", spec).stdout
        plan.breaks.extend([(3, GONE), (0, busy), (2, None), (0, GONE), (2, bare(grpc.StatusCode.UNKNOWN, "removed"))])
        broken = run(example, ",".join(addresses), "p", spec)
        assert (broken.returncode, broken.stderr, broken.stdout) == (0, "", undisturbed)
        assert len(plan.seen) == 7
        plan.breaks.append((3, with_reason(grpc.StatusCode.INTERNAL, "STEP_FAILED")))
        assert run(example, ",".join(addresses), "p", spec).returncode == 1
        assert len(plan.seen) == 8


def test_each_router_is_tried_once_after_one_has_lost_its_engines(example) -> None:
    lost = with_reason(grpc.StatusCode.UNAVAILABLE, "ENGINE_LOST")
    plan = Plan(deque([(3, lost)] + [(1, lost)] * 9))
    with run_routers(3, plan) as addresses:
        assert run(example, ",".join(addresses), "p", {"stopping": {"max_tokens": 9}}).returncode == 1
    assert sorted(number for number, _ in plan.seen) == [0, 1, 2]


def test_a_resumed_stream_keeps_the_rest_of_its_time_limit(example) -> None:
    plan = Plan(deque([(3, GONE), (0, GONE), (0, GONE), (0, GONE)]))
    with run_routers(2, plan) as addresses:
        spec = {"stopping": {"max_tokens": 9}, "time_limit": {"seconds": 100, "nanos": 500_000_000}}
        assert run(example, ",".join(addresses), "p", spec).returncode == 0
    limits = [spec.time_limit.ToTimedelta().total_seconds() for _, spec in plan.seen]
    # The example ran for less than `run`'s timeout of 60 s.
    assert 100.5 - 60 < limits[-1] < limits[0] - 0.2 < 100.5


def test_an_invalid_request_prints_its_invalid_fields(ring, example) -> None:
    done = run(example, ring.address, "x", {"sampling": {"temperature": 9, "top_p": 0}})
    assert done.returncode == 1
    assert done.stdout == ""
    violations = json.loads(done.stderr)
    assert {violation["field"] for violation in violations} == {"spec.sampling.temperature", "spec.sampling.top_p"}
    assert all(violation["description"] for violation in violations)


@pytest.mark.parametrize(
    ("spec", "field", "kind"),
    [
        ({"stoping": {"max_tokens": 9}}, "spec.stoping", "GenerationSpec"),
        ({"stopping": {"maxTokens": 9}}, "spec.stopping.maxTokens", "StoppingCriteria"),
        ({"output": {"tensors": [{"name": "a"}, {"nam": "b"}]}}, "spec.output.tensors[1].nam", "TensorSpec"),
    ],
)
def test_unknown_fields_are_refused(example, spec, field, kind) -> None:
    done = run(example, "127.0.0.1:1", "x", spec)
    assert (done.returncode, done.stdout) == (1, "")
    assert json.loads(done.stderr) == [{"field": field, "description": f"is not a field of {kind}"}]


def test_keys_of_maps_are_free(ring, example) -> None:
    spec = {"sampling": {"logit_bias": {"5": -100}}, "stopping": {"max_tokens": 2}, "time_limit": {"seconds": 60}}
    assert run(example, ring.address, "x", spec).returncode == 0


def test_a_reader_that_has_read_enough_ends_the_example(ring, example) -> None:
    command = ["node", "generate.mjs", "class Stack:", '{"stopping": {"max_tokens": 900, "ignore_eos": true}}']
    environment = {**os.environ, "SLUICE_ADDRESS": ring.address}
    process = subprocess.Popen(command, cwd=example, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 0
