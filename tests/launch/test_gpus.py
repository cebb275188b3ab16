"""The assignment of GPUs to engines, and of ranks to nodes."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.parallel.rank_env import RankEnv, read_rank_env
from sluice.launch import OptionsError
from sluice.launch.gpus import Gpus, assign_gpus, gpus_of_engines, ranks_of, ranks_per_node, visible_gpus
from sluice.launch.plan import Plan, services
from sluice.settings.services import EngineSettings

FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


def engine(environment: dict[str, str], **engine_args) -> EngineSettings:
    """The settings of a ring's engine."""
    planned = services(Plan("model", "name", engine_args=engine_args), Path("/x"))
    return next(service for service in planned if service.role == "engine").settings(environment)


@given(st.integers(1, 16), st.integers(1, 6), st.integers(2, 8))
def test_ranks_of_an_engine_do_not_share_gpus(count, engines, ranks):
    names = [str(i) for i in range(count)]
    if engines * ranks > count:
        with pytest.raises(OptionsError, match=f"need {engines * ranks} GPUs, but {count} are visible: 0"):
            assign_gpus(names, engines, ranks)
        return
    assigned = assign_gpus(names, engines, ranks)
    assert [len(each.names) for each in assigned] == [ranks] * engines
    assert [name for each in assigned for name in each.names] == names[: engines * ranks]
    assert {each.engines for each in assigned} == {1}


@given(st.integers(1, 8), st.integers(1, 20))
def test_engines_of_one_rank_are_spread_evenly(count, engines):
    names = [f"GPU-{i}" for i in range(count)]
    assigned = assign_gpus(names, engines, 1)
    on = [each.names[0] for each in assigned]
    assert on[:count] == names[:engines]
    assert [each.engines for each in assigned] == [on.count(name) for name in on]
    assert max(map(on.count, on)) - min(map(on.count, on)) <= 1


def test_no_gpus():
    assert assign_gpus([], 2, 4) == []


@pytest.mark.parametrize(
    ("named", "gpus"),
    [
        ("0,1", ("0", "1")),
        (" 3, 1 ", ("3", "1")),
        ("GPU-8f2a-11,MIG-0c/7/0", ("GPU-8f2a-11", "MIG-0c/7/0")),
        ("", ()),
        ("-1", ()),
        ("2,-1,0", ("2",)),
    ],
)
def test_cuda_visible_devices_is_read_like_cuda_does(named, gpus, nvidia_smi):
    nvidia_smi(7)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": named}) == gpus


def test_ids_are_passed_to_the_engine_unchanged():
    environment = {"CUDA_VISIBLE_DEVICES": "GPU-8f2a-11,MIG-0c/7/0"}
    assert [gpus.environment for gpus in gpus_of_engines(2, engine(environment), environment)] == [
        {"CUDA_VISIBLE_DEVICES": "GPU-8f2a-11"},
        {"CUDA_VISIBLE_DEVICES": "MIG-0c/7/0"},
    ]


def test_gpus_listed_by_nvidia_smi(nvidia_smi):
    nvidia_smi(0, 1, 10)
    assert visible_gpus({}) == ("0", "1", "10")
    nvidia_smi(status=9)
    assert visible_gpus({}) == ()


def test_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert visible_gpus({}) == ()
    (tmp_path / "nvidia-smi").write_text("not a program")
    assert visible_gpus({}) == ()
    (tmp_path / "nvidia-smi").chmod(0o755)
    with pytest.raises(OptionsError, match=r"cannot list the GPUs .* name them in CUDA_VISIBLE_DEVICES"):
        visible_gpus({})


@pytest.mark.parametrize("where", ["flag", "environment", "file"])
def test_settings_of_the_engine_are_honoured(where, tmp_path):
    """In each of the ways in which an engine reads its settings."""

    def assigned(**settings):
        if where == "flag":
            return gpus_of_engines(2, engine(FOUR, **settings), FOUR)
        if where == "environment":
            variables = {f"SLUICE_ENGINE_{name.upper()}": str(value) for name, value in settings.items()}
            return gpus_of_engines(2, engine(FOUR | variables), FOUR)
        (tmp_path / "engine.yaml").write_text("".join(f"{name}: {value}\n" for name, value in settings.items()))
        return gpus_of_engines(2, engine(FOUR | {"SLUICE_ENGINE_CONFIG": str(tmp_path / "engine.yaml")}), FOUR)

    assert assigned(tensor_parallel=2) == [Gpus(("0", "1")), Gpus(("2", "3"))]
    assert assigned(tensor_parallel=8, device="cpu") == []
    with pytest.raises(OptionsError, match="tensor_parallel: must be greater than or equal to 1"):
        assigned(tensor_parallel=0)


def test_a_flag_takes_precedence_and_an_unreadable_file_is_refused(tmp_path):
    environment = FOUR | {"SLUICE_ENGINE_TENSOR_PARALLEL": "4"}
    assert gpus_of_engines(1, engine(environment, tensor_parallel=2), FOUR) == [Gpus(("0", "1"))]
    assert gpus_of_engines(1, engine(environment), FOUR) == [Gpus(("0", "1", "2", "3"))]
    (tmp_path / "none.yaml").write_text("{")
    with pytest.raises(OptionsError, match="cannot read the settings file"):
        engine({"SLUICE_ENGINE_CONFIG": str(tmp_path / "none.yaml")})


@pytest.mark.parametrize(("ranks", "gpus", "per_node"), [(16, 8, 8), (6, 4, 3), (7, 4, 1), (2, 8, 2), (12, 8, 6)])
def test_every_node_has_the_same_number_of_ranks_and_the_largest_node_fits_them(ranks, gpus, per_node):
    assert ranks_per_node(ranks, gpus) == per_node


@given(st.integers(1, 256), st.integers(1, 256))
def test_all_ranks_are_distributed(ranks, gpus):
    per_node = ranks_per_node(ranks, gpus)
    assert per_node <= gpus
    distributed = ranks_of(ranks, per_node)
    assert [rank.number for rank in distributed] == list(range(ranks))
    assert [rank.local for rank in distributed] == list(range(per_node)) * (ranks // per_node)


def test_an_engine_reads_its_rank_from_the_environment():
    for number, rank in enumerate(ranks_of(4, 2)):
        assert read_rank_env(4, rank.environment) == RankEnv(number, 4, number % 2, 2, external=True)
