"""`collective_rpc`: the values of all ranks, or the error of one."""

import pytest

from sluice.executor import CollectiveRpcError
from sluice.v1 import admin_pb2


def answer(engine: str, rank: int | None, **fields) -> admin_pb2.RankAnswer:
    return admin_pb2.RankAnswer(engine_id=engine, rank=rank, **fields)


def test_values_are_in_order_of_ranks(executor, script) -> None:
    script.rank_answers = [answer("a", 0, value_json="1"), answer("a", 1, value_json='"b"')]
    assert executor.collective_rpc("m", args=(1,), kwargs={"k": 2}, ranks=[0, 1]) == [1, "b"]
    assert script.seen[-1].ranks == [0, 1]


def test_an_error_of_one_rank_is_raised_with_all_answers(executor, script) -> None:
    script.rank_answers = [
        answer("a", 0, value_json="1"),
        answer("a", 1, error="a, rank 1, m: no"),
        answer("b", None, error="b, m: lost"),
    ]
    with pytest.raises(CollectiveRpcError, match=r"^a, rank 1, m: no \(and 1 more\)$") as error:
        executor.collective_rpc("m")
    assert [rank_answer.value for rank_answer in error.value.answers] == [1, None, None]


def test_after_shutdown(executor) -> None:
    executor.shutdown(abort=True)
    with pytest.raises(RuntimeError, match="shut down"):
        executor.collective_rpc("m")
