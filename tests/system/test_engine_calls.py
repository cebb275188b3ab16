"""Calls of methods on the ranks of real engines: two engines with one rank, and one with two ranks and a plugin."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from sluice import Client
from sluice.client import Unavailable
from sluice.executor import CollectiveRpcError, GenerationExecutor
from sluice.launch import Ring
from tests.fakes.processes import wait_until

pytestmark = pytest.mark.timeout(300)

PLUGIN = """
import os, signal, time

def echo(rank, *args, **kwargs):
    return [rank.rank, args, kwargs]

def fail_on(rank, number):
    if rank.rank == number:
        raise ValueError(f"not on {number}")

def sleep(rank, seconds):
    time.sleep(seconds)
    return rank.rank

def die(rank, number):
    if rank.rank == number:
        os.kill(os.getpid(), signal.SIGKILL)
"""
METHODS = ("echo", "fail_on", "sleep", "die")
SPEC = {"max_tokens": 60, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """A package with entry points, as pip would install it, on the import path of every service."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "own_methods.py").write_text(PLUGIN)
    info = folder / "own_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: own-methods\nVersion: 1.0\n")
    lines = [f"{name} = own_methods:{name}" for name in METHODS]
    (info / "entry_points.txt").write_text("\n".join(["[sluice.engine_methods]", *lines, ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH")))))
        patch.syspath_prepend(str(folder))
        yield


@pytest.fixture(scope="module")
def two_ranks(plugin):
    engine = {"tensor_parallel": 2, "threads": 1, "kv_cache_tokens": 4096}
    with GenerationExecutor.create(engines=1, num_postprocess_workers=1, engine_args=engine) as executor:
        yield executor


@pytest.mark.long
def test_every_engine_answers_or_is_named():
    # The router must not count the frozen engine as lost while the call waits for it.
    router = {"peer_timeout": 60.0}
    with Ring(engines=2, detokenizers=1, engine_args={"kv_cache_tokens": 4096}, router_args=router) as ring:
        with GenerationExecutor.connect(ring.address) as executor:
            answers = executor.collective_rpc("memory")
            assert [answer["kv_blocks"] * answer["tokens_per_kv_block"] for answer in answers] == [4096, 4096]
            assert all(answer["used_bytes"] > 0 and answer["free_bytes"] > 0 for answer in answers)
            pids = [answer["pid"] for answer in executor.collective_rpc("ping")]
            assert pids == [ring.pids["engine-0"], ring.pids["engine-1"]]
        with Client(ring.address, timeout=60) as client:
            os.kill(ring.pids["engine-1"], signal.SIGSTOP)
            try:
                first, second = client.call_engines("ping", timeout=5.0)
            finally:
                os.kill(ring.pids["engine-1"], signal.SIGCONT)
            assert first.value["pid"] == pids[0]
            assert second.engine_id == "engine-1"
            assert second.rank is None
            assert second.error == "engine-1, ping: no answer within 5 s; it may have run the method"


@pytest.mark.long
def test_every_rank_answers_in_order(two_ranks):
    answers = two_ranks.collective_rpc("memory")
    assert [answer["kv_blocks"] for answer in answers] == [answers[0]["kv_blocks"]] * 2
    ranks = two_ranks.collective_rpc("ping")
    assert [(answer["rank"], answer["num_ranks"]) for answer in ranks] == [(0, 2), (1, 2)]
    assert ranks[0]["pid"] == two_ranks.pids["engine-0"]
    assert ranks[1]["pid"] != ranks[0]["pid"]
    assert two_ranks.collective_rpc("echo", [1, "é"], {"k": None}) == [[rank, [1, "é"], {"k": None}] for rank in (0, 1)]
    assert two_ranks.collective_rpc("echo", ranks=[1]) == [[1, [], {}]]


@pytest.mark.parametrize(
    ("method", "args", "ranks", "expected"),
    [
        ("nothing", (), None, "engine-0, rank 0, nothing: LookupError: .*there are die, echo, .*(and 1 more)"),
        ("memory", (1,), None, "engine-0, rank 0, memory: TypeError: the arguments do not fit the method"),
        ("fail_on", (1,), None, "^engine-0, rank 1, fail_on: ValueError: not on 1$"),
        ("ping", (), [1, 2], "^engine-0, rank 2, ping: this rank does not exist: the engine's last rank is 1$"),
    ],
)
def test_errors_of_methods_do_not_affect_the_engine(two_ranks, method, args, ranks, expected):
    pid = two_ranks.pids["engine-0"]
    with pytest.raises(CollectiveRpcError, match=expected):
        two_ranks.collective_rpc(method, args, ranks=ranks)
    assert len(two_ranks.collective_rpc("ping")) == 2
    assert two_ranks.pids["engine-0"] == pid


@pytest.mark.long
def test_slow_methods_delay_streams_but_change_no_text(two_ranks):
    expected = two_ranks._session.run(lambda client: client.generate("def f(x):", **SPEC)).text
    texts = []
    stream = threading.Thread(
        target=lambda: texts.append(two_ranks._session.run(lambda client: client.generate("def f(x):", **SPEC)).text)
    )
    stream.start()
    while stream.is_alive():
        assert two_ranks.collective_rpc("sleep", [0.05]) == [0, 1]
    assert texts == [expected]


@pytest.mark.long
def test_the_command_line_prints_the_answer_of_every_rank(two_ranks):
    address = two_ranks._session._client.addresses[0]
    done = subprocess.run(
        [sys.executable, "-m", "sluice", "call", "ping", "--address", address],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert [json.loads(line)["rank"] for line in done.stdout.splitlines()] == [0, 1]


@pytest.mark.long
def test_an_engine_restarts_after_a_rank_died_in_a_method(two_ranks):
    """The call fails with the reason."""
    pid = two_ranks.pids["engine-0"]
    with pytest.raises(CollectiveRpcError, match=r"^engine-0, die: the engine was lost; it may have run the method$"):
        two_ranks.collective_rpc("die", [1])

    def is_back() -> bool:
        try:
            return two_ranks.collective_rpc("ping")[0]["pid"] != pid
        except (CollectiveRpcError, Unavailable):
            return False

    assert wait_until(is_back, 120)
    assert len(two_ranks.collective_rpc("memory")) == 2
