"""The examples in examples/python work as documented."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "python"


def run(name: str, address: str, *arguments: str) -> subprocess.CompletedProcess:
    """Run an example against the ring at `address`."""
    source = (EXAMPLES / name).read_text()
    assert source.count("127.0.0.1:50051") == 1
    return subprocess.run(
        [sys.executable, "-c", source.replace("127.0.0.1:50051", address), *arguments],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_every_example_is_listed_in_the_readme() -> None:
    listed = set(re.findall(r"`(\w+\.py)`", (ROOT / "examples" / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in EXAMPLES.glob("*.py")}


def test_stream(ring) -> None:
    done = run("stream.py", ring.address, "import os")
    assert done.stdout.strip()
    assert "Usage(" in done.stderr


def test_generate(ring) -> None:
    lines = run("generate.py", ring.address).stdout.splitlines()
    assert [line[:3] for line in lines[:3]] == ["0: ", "1: ", "2: "]
    assert lines[-1].startswith("spec.sampling.temperature is 9")


def test_guided(ring) -> None:
    person, answer, drafted = run("guided.py", ring.address).stdout.splitlines()
    assert set(ast.literal_eval(person)) == {"name", "age"}
    assert answer in ("yes", "no")
    assert "tokens came from drafts" in drafted


def test_tensors(ring) -> None:
    lines = run("tensors.py", ring.address).stdout.splitlines()
    entropies = [line for line in lines if "nats" in line]
    assert [line.split()[1] for line in entropies] == [str(row) for row in range(16)]
    assert all(0 <= float(line.split()[-2]) < 9 for line in entropies)
    similar, *different = (float(line.split()[0]) for line in lines[-3:])
    assert all(-1 <= similarity < similar < 1 for similarity in different)


def test_async_many(ring) -> None:
    lines = run("async_many.py", ring.address).stdout.splitlines()
    assert len(lines) == 32
    assert lines[31].startswith("def method_31(self")
