"""Some scenarios on a ring of many machines. `python -m tests.system.hosts` runs all of them."""

import pytest

from tests.system.hosts import scenarios
from tests.system.hosts.network import Network, missing
from tests.system.hosts.page import page
from tests.system.hosts.ring import Ring
from tests.system.hosts.scenarios import BY_DNS
from tests.system.hosts.streams import Outcome, run_disturbed, run_undisturbed

QUICK = (
    "a detokenizer's machine is lost and replaced",
    "an engine drains and moves to a new machine",
    "DNS answers NXDOMAIN",
)


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    if reason := missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("hosts")
    with Network(folder) as network, Ring(network, folder) as ring:
        yield ring


@pytest.fixture(scope="module")
def expected(ring):
    return run_undisturbed(ring)


@pytest.fixture(autouse=True)
def shorter(monkeypatch):
    """The command waits longer, for late consequences of a disturbance."""
    monkeypatch.setattr(scenarios, "AFTER_SECONDS", 2.0)


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", QUICK)
def test_disturbances_change_no_stream(ring, expected, name):
    outcome = run_disturbed(ring, name, BY_DNS[name], expected)
    assert outcome.streams >= len(expected)
    assert (outcome.failed, outcome.changed, outcome.broken) == (0, 0, ""), outcome.text
    # NXDOMAIN must not even move a stream.
    assert bool(outcome.moves) == (name != "DNS answers NXDOMAIN"), outcome.text


def test_the_page_marks_pauses_that_are_too_long():
    text = page([Outcome("calm", 8, pause=0.4), Outcome("late", 8, moves=3, pause=12.34)], [])
    assert "| calm | 8 | 0 | 0 | 0 | 0.4 |" in text
    assert "| late | 8 | 0 | 0 | 3 | **12.3** |" in text
    assert "1 of 2 scenarios" in text
