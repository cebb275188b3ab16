"""The Grafana dashboard: a valid file whose metrics exist and whose queries Prometheus accepts."""

import itertools
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.fakes.metrics_page import documented
from tests.k8s.chart import CHART, kinds, objects_from, objects_of
from tests.k8s.test_rules import needs_promtool

FILE = CHART / "files" / "dashboard.json"
DASHBOARD = json.loads(FILE.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
COLUMNS = 24
# tests/telemetry/test_page.py compares that page with the services' registries.
METRICS = {name: (kind, labels) for name, kind, labels, _ in documented("sluice_")}
PARTS = {"_bucket": "histogram", "_sum": "histogram", "_count": "histogram", "": None}


def metric_of(sample: str) -> tuple[str, str]:
    """Name and type of the metric that has this sample."""
    for suffix, kind in PARTS.items():
        name = sample.removesuffix(suffix) if suffix else sample
        if sample.endswith(suffix) and name in METRICS and kind in (None, METRICS[name][0]):
            return name, METRICS[name][0]
    raise AssertionError(f"no service has {sample}")


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel["title"])
def test_metrics_and_labels_of_the_dashboard_exist(panel) -> None:
    for target in panel["targets"]:
        samples = re.findall(r"sluice_\w+", target["expr"])
        assert samples
        known = {"namespace", "pod", "le"}
        for sample in samples:
            name, kind = metric_of(sample)
            known |= set(METRICS[name][1])
            # A counter without rate() only grows, and a histogram has no sample of this name.
            assert (kind == "gauge") == (f"rate({sample}" not in target["expr"])
        for labels in re.findall(r"by \(([^)]*)\)", target["expr"]):
            assert set(labels.split(", ")) <= known
        assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known
        assert 'namespace=~"$namespace"' in target["expr"]


def test_rows_and_positions_of_panels() -> None:
    rows = [panel["title"] for panel in DASHBOARD["panels"] if panel["type"] == "row"]
    assert rows == [
        "Latency",
        "Throughput",
        "KV cache",
        "KV blocks from elsewhere",
        "Detokenizers",
        "Recovery",
        "Security",
    ]
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = [place for panel in DASHBOARD["panels"] for place in cells(panel["gridPos"])]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) < COLUMNS
    assert all(panel["description"].endswith(".") for panel in PANELS)
    assert all(panel["datasource"]["uid"] == "${datasource}" for panel in PANELS)


def cells(at: dict[str, int]) -> list[tuple[int, int]]:
    return list(itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"])))


def test_every_alert_has_its_metric_on_the_dashboard() -> None:
    shown = {metric_of(sample)[0] for query in QUERIES for sample in re.findall(r"sluice_\w+", query)}
    rules = (CHART / "files" / "rules.yaml").read_text()
    used = {name for name in re.findall(r"sluice_\w+", rules) if not name.endswith("_")}
    assert {metric_of(sample)[0] for sample in used} <= shown


@needs_promtool
def test_prometheus_accepts_the_queries(tmp_path: Path) -> None:
    queries = [query.replace("$__rate_interval", "1m").replace("$namespace", ".*") for query in QUERIES]
    rules = [{"record": f"panel:{i}", "expr": query} for i, query in enumerate(queries)]
    file = tmp_path / "queries.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = subprocess.run(["promtool", "check", "rules", str(file)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_renders_the_dashboard_if_enabled() -> None:
    names = {each["metadata"]["name"] for each in kinds(objects_of("default"), "ConfigMap")}
    assert names == {"sluice"}
    rendered = objects_from({"metrics": {"dashboard": {"enabled": True, "annotations": {"grafana_folder": "LLM"}}}})
    (config_map,) = (each for each in kinds(rendered, "ConfigMap") if each["metadata"]["name"] == "sluice-dashboard")
    assert config_map["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert config_map["metadata"]["annotations"] == {"grafana_folder": "LLM"}
    assert json.loads(config_map["data"]["sluice.json"]) == DASHBOARD
