"""Peers in separate processes, which may be missing, fail or hang."""

import sys

import pytest
import torch

from bench.gpu.children import MARK, Children
from bench.gpu.findings import Skip
from bench.gpu.peers import PEERS, PeerKind, measure_peer
from bench.gpu.shapes import Workload, tiny

WORKS = [Workload(1, 2, 10), Workload(4, 2, 10)]
CPU = torch.device("cpu")
LINE = f"print('{MARK}' + '{{\"batch\": %d, \"seconds\": 2.0}}', flush=True);"


def entry(package: str, cpu: bool = True) -> PeerKind:
    return PeerKind("a peer", package, lambda options: None, cpu)


class Does(Children):
    """Runs this code instead of a peer."""

    def __init__(self, folder, code):
        super().__init__(folder)
        self._code = code

    def run(self, command, seconds):
        return super().run([sys.executable, "-c", self._code], seconds)


@pytest.mark.process
def test_reports_are_read_between_the_output_of_libraries(tmp_path):
    child = Does(tmp_path, f"print('hello'); {LINE % 1} print('loading'); {LINE % 4}")
    results, why = measure_peer(entry("json"), tiny(), WORKS, CPU, child, 100)
    assert [(result.system, result.batch, result.tokens_per_second) for result in results] == [
        ("a peer", 1, 5.0),
        ("a peer", 4, 20.0),
    ]
    assert why == ""


@pytest.mark.process
def test_a_peer_that_fails_keeps_its_earlier_results(tmp_path):
    child = Does(tmp_path, f"{LINE % 1} raise SystemExit('no memory')")
    results, why = measure_peer(entry("json"), tiny(), WORKS, CPU, child, 100)
    assert [result.batch for result in results] == [1]
    assert "status 1" in why
    assert "no memory" in why


@pytest.mark.process
def test_a_peer_that_hangs_is_killed_with_its_descendants(tmp_path):
    code = f"{LINE % 4} import subprocess, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    # Long enough for the report, even on a busy machine.
    results, why = measure_peer(entry("json"), tiny(), WORKS, CPU, Does(tmp_path, code), 10)
    assert [result.batch for result in results] == [4]
    assert "timed out after 10 s" in why


def test_a_peer_that_is_not_installed_is_skipped(tmp_path):
    with pytest.raises(Skip, match="not installed"):
        measure_peer(entry("no_such_package"), tiny(), WORKS, CPU, Children(tmp_path), 30)
    with pytest.raises(Skip, match="CPU"):
        measure_peer(entry("json", cpu=False), tiny(), WORKS, CPU, Children(tmp_path), 30)


def test_peers_are_named_after_the_package_that_they_import():
    assert list(PEERS) == ["transformers", "vllm", "sglang", "nanovllm"]
