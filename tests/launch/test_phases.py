"""Engines for one phase of requests."""

from pathlib import Path

import pytest

from sluice import LLM
from sluice.launch import OptionsError, Plan
from sluice.launch.plan import services


def planned(**options) -> dict[str, str]:
    """The phase that each engine reads from its command line, by its name."""
    engines = [each for each in services(Plan("model", "name", **options), Path("/x")) if each.role == "engine"]
    return {each.name: each.settings({}).phase for each in engines}


@pytest.mark.parametrize(
    ("options", "engines"),
    [
        ({}, {"engine-0": "both"}),
        ({"engines": 2}, {"engine-0": "both", "engine-1": "both"}),
        (
            {"prefill_engines": 1, "decode_engines": 2},
            {"engine-prefill-0": "prefill", "engine-decode-0": "decode", "engine-decode-1": "decode"},
        ),
        ({"engines": 1, "prefill_engines": 1}, {"engine-0": "both", "engine-prefill-0": "prefill"}),
        ({"engine_args": {"phase": "decode"}}, {"engine-0": "decode"}),
    ],
)
def test_engines_have_their_phase(options, engines) -> None:
    assert planned(**options) == engines


def test_every_engine_counts_in_the_shares_of_the_machine_and_has_a_metrics_port(monkeypatch) -> None:
    monkeypatch.setattr("sluice.launch.plan.usable_cores", lambda: 9)
    plan = Plan("model", "name", engines=1, prefill_engines=1, decode_engines=1, metrics_port=7000)
    engines = [each.settings({}) for each in services(plan, Path("/x")) if each.role == "engine"]
    assert [(each.default_threads, each.engines_here, each.engines_per_gpu) for each in engines] == [(3, 3, 3)] * 3
    assert [each.metrics_port for each in engines] == [7001, 7002, 7003]
    assert plan.processes == 6
    assert plan.counts == {"routers": 1, "engines": 1, "prefill_engines": 1, "decode_engines": 1, "detokenizers": 2}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engines": 0}, "engines must be at least 1 (got 0)"),
        ({"engines": -1, "prefill_engines": 1, "decode_engines": 1}, "engines must be at least 0 (got -1)"),
        ({"prefill_engines": -1}, "prefill_engines must be at least 0 (got -1)"),
        ({"decode_engines": -1}, "decode_engines must be at least 0 (got -1)"),
        ({"prefill_engines": 2}, "prefill_engines needs decode_engines or engines, which compute the other phase"),
        ({"decode_engines": 2, "engines": 0}, "decode_engines needs prefill_engines or engines, which compute"),
        (
            {"prefill_engines": 1, "decode_engines": 1, "engine_args": {"phase": "both"}},
            "prefill_engines contradicts engine_args: phase is both for all engines",
        ),
    ],
)
def test_numbers_of_engines_that_cannot_serve_are_refused(options, message) -> None:
    with pytest.raises(OptionsError) as caught:
        Plan("model", "name", **options)
    assert message in str(caught.value)


def test_the_class_llm_has_the_options() -> None:
    with pytest.raises(OptionsError, match="decode_engines needs prefill_engines or engines"):
        LLM(decode_engines=1)
