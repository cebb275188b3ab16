"""Methods that are called by name: their results, and that their errors are contained."""

import json
import os
import sys
from importlib.metadata import EntryPoint

import pytest
import torch

from engine_worker.attention.cache import KVCache
from engine_worker.runner.methods import GROUP, Methods, Rank
from sluice.wire.calls import MAX_ERROR_CHARS, MAX_JSON_BYTES, MethodCall

CPU = torch.device("cpu")


def echo(rank: Rank, *args, **kwargs):
    return [rank.rank, list(args), kwargs]


def add(_: Rank, first: int, second: int = 1):
    return first + second


def fail(_: Rank, text: str):
    raise OSError(text)


def leave(_: Rank):
    sys.exit(3)


def return_bytes(_: Rank):
    return b"\x00"


def return_much(_: Rank, size: int):
    return "x" * size


def raise_type_error(_: Rank):
    return len(3)


METHODS = (echo, add, fail, leave, return_bytes, return_much, raise_type_error)


@pytest.fixture
def methods() -> Methods:
    plugins = [EntryPoint(method.__name__, f"{__name__}:{method.__name__}", GROUP) for method in METHODS]
    plugins += [EntryPoint("gone", "no_such_package:method", GROUP), EntryPoint("ping", f"{__name__}:fail", GROUP)]
    cache = KVCache(2, 10, 4, 3, 8, torch.float32, CPU, num_host_blocks=5)
    return Methods(Rank(1, 2, CPU, None, cache), plugins)


def call(methods: Methods, method: str, *args, **kwargs):
    """The returned value. Raises RuntimeError with the error of the answer."""
    answer = methods.answer(MethodCall(method, json.dumps(args), json.dumps(kwargs)))
    assert answer.rank == 1
    assert (answer.value is None) != (answer.error == "")
    if answer.error:
        raise RuntimeError(answer.error)
    return json.loads(answer.value)


def test_arguments_and_values_are_json(methods):
    assert call(methods, "echo", 1, [2.5, None], key={"a": "é"}) == [1, [1, [2.5, None]], {"key": {"a": "é"}}]
    assert call(methods, "add", 2) == 3
    assert call(methods, "add", 2, second=5) == 7


def test_memory(methods):
    usage = call(methods, "memory")
    assert usage.pop("used_bytes") > 1 << 20
    assert usage.pop("free_bytes") > 0
    slots = 2 * 2 * 10 * 4 * 3 * 8
    assert usage == {
        "device": "cpu",
        "kv_bytes": slots * 4,
        "kv_blocks": 10,
        "kv_host_blocks": 5,
        "tokens_per_kv_block": 4,
    }


def test_ping_is_the_built_in_one(methods):
    answer = call(methods, "ping")
    assert (answer["pid"], answer["rank"], answer["num_ranks"]) == (os.getpid(), 1, 2)


def test_versions(methods):
    versions = call(methods, "versions")
    assert versions["torch"] == torch.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))


@pytest.mark.parametrize(
    ("method", "args", "expected"),
    [
        ("nothing", [], "LookupError: .*there is no method 'nothing'; there are add, .*memory, ping, .*versions"),
        ("memory", [1], "TypeError: the arguments do not fit the method: too many positional arguments"),
        ("add", [], "TypeError: the arguments do not fit the method: missing a required argument: 'first'"),
        ("raise_type_error", [], "^TypeError: object of type 'int' has no len"),
        ("fail", ["disk full"], "OSError: disk full"),
        ("leave", [], "SystemExit: 3"),
        ("return_bytes", [], "TypeError: .*bytes is not JSON serializable"),
        ("return_much", [MAX_JSON_BYTES], f"value has {MAX_JSON_BYTES + 2} bytes as JSON, more than {MAX_JSON_BYTES}"),
        ("gone", [], "ModuleNotFoundError: No module named 'no_such_package'"),
    ],
)
def test_errors_are_answers(methods, method, args, expected):
    with pytest.raises(RuntimeError, match=expected):
        call(methods, method, *args)


def test_an_unknown_named_argument(methods):
    with pytest.raises(RuntimeError, match="got an unexpected keyword argument 'colour'"):
        call(methods, "add", 1, colour="red")


def test_a_long_error_is_cut(methods):
    with pytest.raises(RuntimeError) as error:
        call(methods, "fail", "x" * 5000)
    assert len(str(error.value)) == MAX_ERROR_CHARS


def test_invalid_json_arguments(methods):
    assert "JSONDecodeError" in methods.answer(MethodCall("ping", "[")).error
