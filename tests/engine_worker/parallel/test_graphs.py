"""Generation steps as graphs on two ranks, with fake graphs and gloo."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.fakes.ports import free_ports

pytestmark = [pytest.mark.process, pytest.mark.slow]

ROOT = Path(__file__).parents[3]
RANK = "tests.engine_worker.parallel.fake_graph_rank"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_ranks_replay_the_steps_of_one(tmp_path):
    """Padded steps, with tokens that only rank 0 has sampled; both ranks drop their graphs before the group ends."""
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    port = str(free_ports(1))
    variables = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", RANK, str(tmp_path)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, **variables, "GLOO_SOCKET_IFNAME": "lo", "RANK": str(i), "LOCAL_RANK": str(i)},
        )
        for i in range(2)
    ]
    try:
        printed = [rank.communicate(timeout=200)[0] for rank in ranks]
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    report = json.loads(printed[0])
    assert report["tokens"] == report["expected"]
    assert report["graphs"].startswith("4 up to 5 and ")
    assert report["replays"] == 12
    assert report["left"] == [0]
