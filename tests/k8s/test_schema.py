"""Values: unknown keys are refused at every level, and the settings are those of the services."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from helm_python import Chart, HelmError

from k8s.render import SCHEMA, schema_with_settings
from tests.k8s.chart import CHART, render

SCHEMA_TREE = json.loads(SCHEMA.read_text())


def closed_objects(schema: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of all objects that declare their keys. A list has one path, for its elements."""
    if "$ref" in schema:
        schema = SCHEMA_TREE["$defs"][schema["$ref"].rpartition("/")[2]]
    if "properties" in schema:
        assert schema["additionalProperties"] is False, path
        yield path
        for key, below in schema["properties"].items():
            yield from closed_objects(below, (*path, key))
    if schema.get("type") == "array":
        yield from closed_objects(schema["items"], (*path, "[]"))


def with_typo(path: tuple[str, ...]) -> Any:
    if not path:
        return {"tpyo": 1}
    below = with_typo(path[1:])
    if path[0] == "[]":
        return [{"name": "pool", **below}]
    return {path[0]: below}


@pytest.mark.parametrize("path", closed_objects(SCHEMA_TREE), ids=".".join)
def test_a_typo_is_refused_at_each_level(path: tuple[str, ...]) -> None:
    with Chart.load(CHART) as chart, pytest.raises(HelmError, match="tpyo"):
        chart.validate_schema(with_typo(path))


def test_every_level_is_described() -> None:
    def described(schema: dict[str, Any], path: str) -> None:
        for key, below in schema.get("properties", {}).items():
            assert below.get("description"), f"{path}.{key}"
            described(below, f"{path}.{key}")

    described(SCHEMA_TREE, "")


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"ring": {"ipFamily": "IPv5"}}, "ipFamily"),
        ({"router": {"port": 0}}, "port"),
        ({"engine": {"replicas": "two"}}, "replicas"),
        ({"engine": {"settings": {"max_batch_size": "many"}}}, "max_batch_size"),
        ({"engine": {"settings": {"max_live": 3}}}, "max_live"),
        ({"engines": [{"replicas": 2}]}, "name"),
        ({"engines": [{"name": "Not A Name"}]}, "name"),
        ({"model": {"source": "floppy"}}, "source"),
    ],
)
def test_a_bad_value_is_refused(values: dict[str, Any], problem: str) -> None:
    with Chart.load(CHART) as chart, pytest.raises(HelmError, match=problem):
        chart.validate_schema(values)


def test_settings_in_the_schema_are_those_of_the_services() -> None:
    assert SCHEMA.read_text() == schema_with_settings(), "run: make manifests"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"router": {"admin": {"enabled": True}}}, "router.admin.tokensSecret"),
        ({"router": {"tls": {"clientCa": "clients"}}}, "router.tls.secretName"),
        ({"model": {"source": "pvc"}}, "model.pvc"),
        ({"detok": {"autoscaling": {"kind": "keda"}}}, "prometheusAddress"),
    ],
)
def test_values_that_do_not_work_together_are_refused(values: dict[str, Any], problem: str) -> None:
    with pytest.raises(HelmError, match=problem):
        render(values)
