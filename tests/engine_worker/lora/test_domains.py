"""In any order of loads, requests, removals and replaced weights under the same name, with both caches too small, a
request gets the output of the version that it names, or an error that says why not."""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given
from hypothesis import strategies as st
from msgspec.structs import replace

from sluice.settings.engine import SchedulerNames
from sluice.wire.adapters import Adapter
from sluice.wire.params import BeamSearchParams, Speculation
from tests.engine_worker.lora.engines import finish, held, lora_engine
from tests.engine_worker.lora.oracle import ATTENTION, files_of, write_adapter
from tests.examples import examples
from tests.fakes.engine import spec_of
from tests.fakes.submits import extras_of, with_extras

PROMPT = [(i * i * 7 + 3 * i) % 97 for i in range(60)]
OPTIONS = (
    {"rank": 8},
    {"rank": 4, "targets": ATTENTION},
    {"rank": 20, "targets": ("v_proj", "down_proj")},
    {"rank": 1},
)


@pytest.fixture(scope="module")
def made(model):
    return [write_adapter(model.parent / f"made{seed}", model, seed, **options) for seed, options in enumerate(OPTIONS)]


class Answers:
    """The output of a request that an engine computes alone."""

    def __init__(self, model: Path, made: list[Path]) -> None:
        self._model = model
        self._folders = {files_of(folder).version: folder for folder in made}
        self._found: dict[object, list[list[int]]] = {}

    def of(self, spec) -> list[list[int]]:
        version = spec.adapter_version
        adapter = version and Adapter("alone", version, str(self._folders[version]))
        alone = with_extras(replace(spec, request=1), adapter=adapter, speculation=Speculation())
        key = (adapter, tuple(spec.prompt), spec.n, spec.sampling, spec.stopping)
        if key not in self._found:
            bench = lora_engine(self._model)
            bench.send(alone)
            finish(bench)
            self._found[key] = [bench.output(1, index) for index in range(spec.n)]
        return self._found[key]


@pytest.fixture(scope="module")
def answers(model, made):
    return Answers(model, made)


submits = st.tuples(
    st.just("submit"),
    st.sampled_from(["a", "b", "c", None]),
    st.sampled_from([10, 33, 60]),
    st.sampled_from(["plain", "plain", "two", "drafts", "beams", "salt"]),
)
actions = st.lists(
    st.one_of(
        submits,
        submits,
        st.tuples(st.just("reload"), st.sampled_from("abc"), st.integers(0, 3)),
        st.tuples(st.just("step"), st.integers(1, 6)),
        st.tuples(st.just("remove"), st.integers(0, 3)),
        st.tuples(st.just("cancel")),
    ),
    min_size=4,
    max_size=16,
)


# Shrinking a failing example would take many minutes of real steps.
@examples(12, suppress_health_check=list(HealthCheck), phases=(Phase.generate,))
@given(
    actions=actions,
    overlap=st.booleans(),
    tokens=st.sampled_from([160, 400]),
    policy=st.sampled_from(["max_utilization", "max_utilization", "guaranteed_no_evict", "static_batch"]),
)
def test_no_output_of_other_weights(model, made, answers, actions, overlap, tokens, policy):
    bench = lora_engine(
        model,
        overlap=overlap,
        kv_cache_tokens=tokens,
        # The largest adapter takes 14 pages; two of them never fit.
        lora_num_device_module_layer=8 * 16,
        lora_host_cache_size=120_000,
        batching={"max_tokens_per_step": 24, "max_batch_size": 6, "schedulers": SchedulerNames(policy)},
    )
    names = {name: place(bench, model, made, name, i) for i, name in enumerate("abc")}
    cancelled: set[int] = set()
    disturbed: set[int] = set()
    """Requests whose adapter's files were replaced after they were submitted."""
    for action, *details in actions:
        if action == "submit":
            name, size, kind = details
            if kind != "beams" or policy == "max_utilization":
                submit(bench, answers, None if name is None else names[name], size, kind)
        elif action == "reload":
            disturbed |= requests_for(bench, details[0])
            names[details[0]] = place(bench, model, made, *details)
        elif action == "remove":
            bench.runner.adapters.remove(files_of(made[details[0]]).version)
        elif action == "cancel" and bench.specs:
            cancelled.add(len(bench.specs))
            bench.cancel(len(bench.specs))
        else:
            for _ in range(details[0] if details else 1):
                bench.step()
    finish(bench)
    check_all(bench, answers, cancelled, disturbed)
    library = bench.runner.adapters
    assert all(library.remove(version) for version in held(library))


def requests_for(bench, name: str) -> set[int]:
    return {
        number
        for (number, _), spec in bench.specs.items()
        if (adapter := extras_of(spec).adapter) and adapter.id == name
    }


def place(bench, model, made, name: str, index: int) -> Adapter:
    """Put the files of one adapter into the folder of this name, as an operator would."""
    folder = model.parent / "live" / str(id(bench)) / name
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made[index], folder)
    return Adapter(name, files_of(folder).version, str(folder))


def submit(bench, answers, adapter, size: int, kind: str) -> None:
    options = {"two": {"n": 2}, "beams": {"beams": BeamSearchParams(2), "n": 2}, "salt": {"salt": "x"}}.get(kind, {})
    spec = spec_of(PROMPT[:size], 10, request=len(bench.specs) + 1, adapter=adapter, **options)
    spec = replace(spec, sampling=replace(spec.sampling, temperature=0.0 if kind == "drafts" else 1.0, seed=size))
    if kind == "drafts":
        expected = list(answers.of(spec)[0])
        expected[5:6] = [0]
        spec = with_extras(spec, speculation=Speculation(4, tuple(expected)))
    bench.send(spec)


def check_all(bench, answers, cancelled: set[int], disturbed: set[int]) -> None:
    for (number, _), spec in bench.specs.items():
        for index, expected in enumerate(answers.of(spec)):
            if bench.stream(number, index).end.fault is None:
                check(bench, number, index, expected, number in cancelled)
            else:
                assert number in disturbed
                check_refused(bench, number, index)


def check(bench, number: int, index: int, expected: list[int], cancelled: bool) -> None:
    tokens = bench.stream(number, index).tokens
    assert tokens == (expected[: len(tokens)] if cancelled else expected)


def check_refused(bench, number: int, index: int) -> None:
    """Check a stream whose adapter's files were replaced before or while a thread read them."""
    stream = bench.stream(number, index)
    assert not stream.tokens
    if stream.end.fault.code == "ADAPTER_MISSING":
        assert "have changed" in stream.end.fault.message
    else:
        assert stream.end.fault.code == "INVALID_ARGUMENT"
        assert "cannot be read" in stream.end.fault.message
