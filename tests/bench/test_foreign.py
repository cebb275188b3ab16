"""The comparison with llama.cpp's server, with a stand-in for that server."""

import json
import sys
from pathlib import Path

import pytest

from bench import foreign
from bench.harness.children import ROOT

STAND_IN = """#!{python}
import signal, sys
sys.path.insert(0, {root!r})
from tests.fakes.openai_server import Script, serve
with serve(Script(), int(sys.argv[sys.argv.index("--port") + 1])):
    signal.pause()
"""


def executable(folder: Path) -> Path:
    file = folder / "llama-server"
    file.write_text(STAND_IN.format(python=sys.executable, root=str(ROOT)))
    file.chmod(0o755)
    return file


def test_a_server_that_exits_is_reported_with_its_log(tmp_path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such model')"]
    with (
        pytest.raises(RuntimeError, match="no such model"),
        foreign.foreign_server(command, foreign._free_port(), tmp_path / "log"),
    ):
        pass


@pytest.mark.long
@pytest.mark.process
@pytest.mark.slow
def test_whole(tmp_path, capfd) -> None:
    arguments = [str(executable(tmp_path)), "--models", "tiny", "--precisions", "float32", "--gguf-python", "true"]
    arguments += ["--requests", "2", "--concurrency", "2", "--rounds", "1", "--threads", "1", "--out", str(tmp_path)]
    foreign.main(arguments)
    runs = json.loads((tmp_path / "tiny-float32.json").read_text())
    assert [(each["server"], each["completed"]) for each in runs] == [("ring", 2), ("gateway", 2), ("llama.cpp", 2)]
    assert "tiny, float32" in capfd.readouterr().out
