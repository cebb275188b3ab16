"""AdminService.CallEngines: validates a call, and adds engine, rank and method to each error."""

import re
from collections.abc import Callable

from router.errors import Violations, shown
from router.peers.engine_calls import EngineAnswers, EngineCalls
from sluice.v1 import admin_pb2 as pb
from sluice.wire.calls import MAX_JSON_BYTES, MAX_METHOD_CHARS, MAX_RANKS, MethodCall, RankAnswer, parse_json

DEFAULT_SECONDS = 30.0
LONGEST_SECONDS = 3600.0
METHOD = re.compile(rf"[A-Za-z0-9_.:-]{{1,{MAX_METHOD_CHARS}}}", re.ASCII)


async def call_engines(message: pb.CallEnginesRequest, calls: EngineCalls) -> pb.CallEnginesResponse:
    """Raises RequestError INVALID_ARGUMENT with every violation, or NO_ENGINE."""
    bad = Violations()
    timeout = DEFAULT_SECONDS
    if message.HasField("timeout"):
        timeout = bad.duration("timeout", message.timeout, LONGEST_SECONDS)
    call = _parse(message, bad)
    bad.raise_if_any()
    engines = await calls.call(call, timeout)
    return pb.CallEnginesResponse(
        answers=[_answer(engine, answer, call.method) for engine in engines for answer in engine.answers]
    )


def _parse(message: pb.CallEnginesRequest, bad: Violations) -> MethodCall:
    if not METHOD.fullmatch(message.method):
        description = f"is {shown(message.method)}, must be 1 to {MAX_METHOD_CHARS} characters of A-Z a-z 0-9 _ . : -"
        bad.add("method", description, private=True)
    args, kwargs = message.args_json or "[]", message.kwargs_json or "{}"
    size = len(args.encode()) + len(kwargs.encode())
    if bad.at_most("args_json and kwargs_json", size, MAX_JSON_BYTES, "bytes together"):
        _check_json(bad, "args_json", args, "an array", lambda value: isinstance(value, list))
        _check_json(bad, "kwargs_json", kwargs, "an object", lambda value: isinstance(value, dict))
    bad.at_most("ranks", len(message.ranks), MAX_RANKS, "ranks")
    if max(message.ranks, default=0) >= MAX_RANKS:
        bad.add("ranks", f"names rank {max(message.ranks)}, must be below {MAX_RANKS}")
    return MethodCall(message.method, args, kwargs, tuple(message.ranks))


def _check_json(bad: Violations, field: str, text: str, kind: str, fits: Callable[[object], bool]) -> None:
    try:
        value = parse_json(text)
    except ValueError as error:
        bad.add(field, f"cannot be read as JSON: {error}", private=True)
        return
    if not fits(value):
        bad.add(field, f"is {shown(text)}, must be {kind}", private=True)


def _answer(engine: EngineAnswers, answer: RankAnswer, method: str) -> pb.RankAnswer:
    where = engine.engine if answer.rank is None else f"{engine.engine}, rank {answer.rank}"
    if answer.value is None:
        return pb.RankAnswer(engine_id=engine.engine, rank=answer.rank, error=f"{where}, {method}: {answer.error}")
    return pb.RankAnswer(engine_id=engine.engine, rank=answer.rank, value_json=answer.value)
