"""The examples in Go, Java and C++, built as their READMEs say, if the tools are installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from sluice import Client
from sluice.cli.commands import app

ROOT = Path(__file__).parents[2]
PROMPT = "def fibonacci(n):"
TOOLS = {
    "go": ("go", "protoc", "protoc-gen-go", "protoc-gen-go-grpc"),
    "java": ("java", "javac", "protoc", "grpc_java_plugin"),
    "cpp": ("g++", "pkg-config", "protoc", "grpc_cpp_plugin"),
}
# Compiling C++ takes 17 seconds of CPU time.
LANGUAGES = ("go", "java", pytest.param("cpp", marks=pytest.mark.long))

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module", params=LANGUAGES)
def program(request, tmp_path_factory) -> Path:
    if missing := [tool for tool in TOOLS[request.param] if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    folder = tmp_path_factory.mktemp(request.param)
    for file in (ROOT / "examples" / request.param).iterdir():
        if file.is_file():
            shutil.copy(file, folder)
    assert CliRunner().invoke(app, ["protos", "export", str(folder / "protos")]).exit_code == 0
    build = subprocess.run(["make", "generate"], cwd=folder, capture_output=True, text=True, timeout=250)
    assert build.returncode == 0, build.stderr[-2000:]
    return folder / "generate"


def run(program: Path, address: str, prompt: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "SLUICE_ADDRESS": address}
    return subprocess.run([str(program), prompt], capture_output=True, text=True, timeout=60, env=environment)


def test_a_completion_streams(ring, program) -> None:
    with Client(ring.address) as client:
        expected = client.generate(PROMPT, temperature=0, max_tokens=32).text
    done = run(program, ring.address, PROMPT)
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr


def test_an_error_is_printed_with_its_reason(ring, program) -> None:
    done = run(program, ring.address, "x " * 4000)
    assert done.returncode == 1
    assert done.stderr.startswith("CONTEXT_OVERFLOW: "), done.stderr
