import subprocess
import sys
from pathlib import Path

import pytest

from bench.harness.children import SystemProcess
from bench.harness.load import Load, PlannedRequest, Run, Trace
from bench.peers import checkpoints
from bench.peers.catalog import KINDS, LLAMA, OPENVINO, VARIABLE, VLLM
from bench.peers.contenders import Field, Named, Ours
from bench.topics.peers import Work

ROOT = Path(__file__).parents[2]
MODULES = [kind.module for kind in KINDS.values()]


def test_a_peers_child_imports_no_more_than_msgspec_before_it_starts():
    code = (
        "import sys\n"
        f"before = set(sys.modules)\nimport {', '.join(MODULES)}\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert set(done.stdout.split()) - {"typing_extensions"} == {"bench", "sluice", "msgspec"}


@pytest.mark.process
def test_a_child_runs_in_the_given_interpreter(tmp_path):
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "named, $3 $4" >&2\nexit 3\n')
    python.chmod(0o755)
    child = SystemProcess("peer", "some.module", ["serve", "folder"], tmp_path / "log", python=python)
    with child, pytest.raises(RuntimeError, match="named, serve folder"):
        child.run(Load([], 1))


def test_the_environment_variable_names_the_folder_of_the_peers(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    assert not OPENVINO.is_installed
    (tmp_path / OPENVINO.name / "bin").mkdir(parents=True)
    (tmp_path / OPENVINO.name / "bin" / "python").touch()
    assert OPENVINO.is_installed


def test_a_checkpoint_is_written_once_and_completely(tmp_path, monkeypatch):
    written = []

    def write(folder, shape):
        written.append(shape)
        (folder / "weights").touch()
        if len(written) == 1:
            raise OSError("no space")

    monkeypatch.setenv(checkpoints.VARIABLE, str(tmp_path))
    monkeypatch.setattr(checkpoints, "_write", write)
    with pytest.raises(OSError, match="no space"):
        checkpoints.checkpoint("5M")
    folder = checkpoints.checkpoint("5M")
    assert checkpoints.checkpoint("5M") == folder
    assert [file.name for file in folder.iterdir()] == ["weights"]
    assert written == [checkpoints.SHAPES["5M"]] * 2


def test_configurations_with_unknown_settings_are_left_out():
    assert Ours("", "float32", {}).is_possible
    assert Ours("", "float32", {"overlap": True}).is_possible
    assert not Ours("", "int8", {"overlap": True, "no_such_setting": 1}).is_possible


class Short:
    name = "short"

    def run(self, load: Load) -> Run:
        return Run(1.0, {}, [Trace(0.0, [0.5], [request.max_tokens - 1], []) for request in load.requests])


def test_a_wrong_number_of_tokens_raises():
    with pytest.raises(RuntimeError, match="OpenVINO generated 7 tokens instead of 9"):
        Named("OpenVINO", Short()).run(Load([PlannedRequest([1], 4), PlannedRequest([2], 5)], 1))


def test_all_systems_get_the_same_salted_prompts():
    seen = []

    class Whole(Short):
        def run(self, load: Load) -> Run:
            seen.append(load.requests)
            return Run(1.0, {}, [Trace(0.0, [0.5], [request.max_tokens], []) for request in load.requests])

    load = Load([PlannedRequest([1, 2, 3], 4)], 1, salt="-0")
    for name in "ab":
        Named(name, Whole()).run(load)
    assert seen[0] == seen[1] == load.salted().requests
    assert seen[0] != load.requests


def test_prompts_of_a_work_have_its_shared_prefix_and_lengths():
    shared = Work("", 6, 2, 64, 1, 4, shared_tokens=48).load().requests
    assert {tuple(request.prompt[:48]) for request in shared} == {tuple(shared[0].prompt[:48])}
    assert len({tuple(request.prompt) for request in shared}) == 6
    mixed = Work("", 30, 2, 64, 1, 4, shortest_prompt=8).load().requests
    assert min(len(request.prompt) for request in mixed) >= 8
    assert len({len(request.prompt) for request in mixed}) > 5


def test_works_with_equal_prompts_have_different_salts():
    first, second = (Work(title, 1, 1, 16, 1, 1).load() for title in ("one", "two"))
    assert first.requests == second.requests
    assert first.salted().requests != second.salted().requests


def test_salts_change_the_first_tokens_and_keep_shared_prefixes():
    load = Work("", 3, 3, 64, 1, 4, shared_tokens=48).load()
    first, second = (Load(load.requests, 3, salt=salt).salted() for salt in ("-0", "-1"))
    assert first.requests[0].prompt[:2] != second.requests[0].prompt[:2]
    for salted in (first, second):
        assert {tuple(request.prompt[:48]) for request in salted.requests} == {tuple(salted.requests[0].prompt[:48])}
        assert [request.prompt[2:] for request in salted.requests] == [request.prompt[2:] for request in load.requests]
    assert len(Load([PlannedRequest([5], 1)], 1, salt="a").salted().requests[0].prompt) == 1


def test_the_version_of_libraries_from_npm_names_their_package(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    LLAMA.npm_folder.mkdir(parents=True)
    (LLAMA.npm_folder / "package.json").write_text('{"name": "@node-llama-cpp/linux-x64", "version": "1.2.3"}')
    assert LLAMA.version() == "node-llama-cpp-1.2.3"


def test_systems_of_other_precisions_are_left_out(tmp_path, monkeypatch):
    started = []
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.setattr(Field, "_peer", lambda _self, kind, precision, *_: started.append((kind.name, precision)))
    monkeypatch.setattr(Field, "_ours", lambda _self, work, *_: started.append(("ours", work.precision)) or [])
    for kind in (OPENVINO, VLLM):
        kind.python.parent.mkdir(parents=True)
        kind.python.touch()
    ours = [Ours("", "float32", {}), Ours("", "int8", {})]
    field = Field("25M", [], ours, [OPENVINO, LLAMA, VLLM], 1, 1, 64, precisions=("int8", "bfloat16"))
    with field.started(tmp_path, lambda _: None):
        assert started == [(OPENVINO.name, "int8"), (VLLM.name, "bfloat16"), ("ours", "int8")]
