"""A request's phases: TRANSITIONS is enforced, the documentation shows it, and only RequestState writes the state."""

import ast
from itertools import product
from pathlib import Path

import pytest

import router
from router.parse.model import describe
from router.requests.request_state import PREPARING, SUBMITTED, TRANSITIONS, RequestPhase, RequestState
from sluice.v1 import generation_pb2 as pb
from sluice.wire.params import RetentionParams
from tests.router.parse.test_parse import spec_of
from tests.router.requests.states import PAGE, attempt, diagram, permit, phase_table, submit


@pytest.fixture
def state(checkpoint):
    return RequestState(1, spec_of(pb.GenerationSpec(text="t"), describe(checkpoint)))


def test_the_documentation_shows_the_current_phases():
    page = PAGE.read_text(encoding="utf-8")
    assert diagram() in page, "run: python -m tests.router.requests.states"
    assert phase_table() in page


@pytest.mark.parametrize(("before", "after"), product(RequestPhase, RequestPhase))
def test_a_transition_that_the_table_does_not_list_is_refused(state, before, after):
    state.phase = before
    if after in TRANSITIONS[before]:
        state.move_to(after)
        assert state.phase is after
    else:
        with pytest.raises(RuntimeError):
            state.move_to(after)
        assert state.phase is before


def test_every_phase_is_reached_and_every_one_can_end():
    reached, todo = set(), [RequestPhase.TOKENIZING]
    while todo:
        phase = todo.pop()
        if phase not in reached:
            reached.add(phase)
            todo += TRANSITIONS[phase]
    assert reached == set(RequestPhase) == set(TRANSITIONS)
    assert all(RequestPhase.ENDED in TRANSITIONS[phase] for phase in reached - {RequestPhase.ENDED})
    assert not PREPARING & SUBMITTED


def test_two_attempts(state):
    assert state.preparing
    submit(state)
    assert (state.phase, state.attempts, state.attempt.number) == (RequestPhase.ON_RING, 1, 0)
    state.on_attempt_lost("ENGINE_LOST", avoid=True)
    assert (state.fruitless, state.avoided) == (1, {1, 2})
    state.move_to(RequestPhase.RECOVERING)
    assert not state.on_ring
    assert not state.preparing
    state.on_submitted(attempt(1))
    assert (state.attempts, state.attempt.number) == (2, 1)
    state.move_to(RequestPhase.ENDED)
    state.end()
    assert state.phase is RequestPhase.ENDED


@pytest.mark.parametrize("phase", [RequestPhase.PAUSED, RequestPhase.ENDED])
def test_the_permit_is_released_on_pause_and_end(state, phase):
    held = permit()
    state.on_tokenized([1], state.spec.sampling, RetentionParams())
    state.on_admitted(held)
    state.on_submitted(attempt())
    state.move_to(phase)
    assert held._admission is None


def test_a_paused_request_recovers_with_another_permit(state):
    submit(state)
    state.move_to(RequestPhase.PAUSED)
    held = permit()
    state.on_admitted(held)
    assert state.phase is RequestPhase.RECOVERING
    assert held._admission is not None


def test_there_is_no_attempt_before_the_first(state):
    assert (state.engine, state.detokenizer) == (None, None)
    with pytest.raises(RuntimeError):
        _ = state.attempt


def test_no_other_module_writes_the_state(state):
    """No other module assigns an attribute with the name of a field, or reads a private one."""
    for name, value in vars(RequestState).items():
        if isinstance(value, property):
            with pytest.raises(AttributeError):
                setattr(state, name, None)
    assert len(vars(state)) > 20
    for path in Path(router.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in vars(state):
                read_only = isinstance(node.ctx, ast.Load) and not node.attr.startswith("_")
                assert read_only or ast.unparse(node.value) == "self", f"{path.name}:{node.lineno}"
