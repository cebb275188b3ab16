"""Errors can be sent to another process."""

import ast
import pickle
from importlib import import_module
from pathlib import Path

import pytest

from engine_worker.attention.backend import Refusal, RefusedError
from engine_worker.keeper.link import AnswerError
from engine_worker.parallel.channel import RankGoneError
from engine_worker.sampling.callbacks import CallbackError
from router import errors as router
from sluice.client import InvalidRequest, RankAnswer, Violation
from sluice.executor import CollectiveRpcError, RequestError
from sluice.host.socket_file import ListenError
from sluice.launch import RingError
from sluice.llm import UnsupportedNameError
from sluice.trtllm import OptionError, UnsupportedOptionError

INVALID = InvalidRequest("seed: is -1", reason="INVALID", violations=(Violation("seed", "is -1"),), retry_after=2.0)
ERRORS = [
    AnswerError("timeout", "no answer in 2 s"),
    INVALID,
    RequestError(3, 7, INVALID),
    CollectiveRpcError([RankAnswer(0, 1, None, "no such method")]),
    RingError("engine-0 ended", ["Traceback"]),
    OptionError("is 0"),
    UnsupportedOptionError("Request.x", "it is not implemented"),
    UnsupportedNameError("LLM.score"),
    ListenError("tcp://127.0.0.1:1", "another process listens there", in_use=True),
    RefusedError(Refusal.WRONG, "off by one"),
    RankGoneError(3),
    CallbackError("raised KeyError", "no such key"),
    router.RequestError.invalid([router.Violation("spec.seed", "is -1", private=True)], metadata={"seed": "-1"}),
]
PACKAGES = ("sluice", "router", "engine_worker", "detok_service", "gateway")


def exceptions_with_arguments() -> set[type]:
    """The exception classes of all packages whose constructors are their own."""
    root, found = Path(__file__).parents[2], set()
    for file in sorted(file for package in PACKAGES for file in (root / package).rglob("*.py")):
        for node in ast.parse(file.read_text(encoding="utf-8")).body:
            bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
            own = isinstance(node, ast.ClassDef) and any(getattr(part, "name", "") == "__init__" for part in node.body)
            if own and any(base.endswith(("Error", "Exception")) for base in bases):
                module = ".".join(file.relative_to(root).with_suffix("").parts)
                found.add(getattr(import_module(module), node.name))
    return found


def test_each_exception_with_arguments_of_its_own_is_pickled_below() -> None:
    pickled = {kind for error in ERRORS for kind in type(error).__mro__}
    assert exceptions_with_arguments() <= pickled


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_pickled_and_back(error) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    attributes = {name: value for name, value in vars(error).items() if name != "error"}
    assert {name: getattr(copy, name) for name in attributes} == attributes


def test_a_copied_request_error_has_its_cause() -> None:
    copy = pickle.loads(pickle.dumps(RequestError(3, None, INVALID)))
    assert isinstance(copy.error, InvalidRequest)
    assert copy.__cause__ is copy.error
    assert copy.error.violations == INVALID.violations
    assert not copy.retryable
