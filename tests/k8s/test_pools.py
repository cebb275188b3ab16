"""Pools of engines: where their KV cache is, their phase, and their autoscaling."""

import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError

from tests.k8s.chart import Object, Pod, kinds, objects_from, pods, render

CPU: dict[str, Any] = {"gpu": {"count": 0}, "resources": {"limits": {"cpu": "4", "memory": "12Gi"}}}
KEDA: dict[str, Any] = {"kind": "keda", "maxReplicas": 6, "keda": {"prometheusAddress": "http://prometheus:9090"}}


def engines(objects: tuple[Object, ...]) -> list[Pod]:
    return [pod for pod in pods(objects) if pod.component == "engine"]


def settings_of_pools(objects: tuple[Object, ...]) -> dict[str, dict[str, Any]]:
    """The settings file of each pool of engines."""
    (config,) = kinds(objects, "ConfigMap")
    return {
        file.removeprefix("engine").removeprefix("-").removesuffix(".yaml"): yaml.safe_load(text)
        for file, text in config["data"].items()
        if file.startswith("engine")
    }


@pytest.mark.parametrize(
    ("engine", "folder", "size"),
    [
        (CPU, "/dev/shm/sluice", "12Gi"),
        ({**CPU, "shmSize": "8Gi"}, "/dev/shm/sluice", "8Gi"),
        ({**CPU, "resources": {"limits": None}}, "/dev/shm/sluice", None),
        ({**CPU, "settings": {"kv_folder": "none"}}, "none", "1Gi"),
        ({**CPU, "settings": {"kv_folder": "/dev/shm/mine"}}, "/dev/shm/mine", "12Gi"),
        ({**CPU, "settings": {"device": "cuda"}}, None, "1Gi"),
        ({**CPU, "settings": {"tensor_parallel": 2}}, None, "1Gi"),
        ({**CPU, "multiNode": {"size": 2}}, None, "1Gi"),
        ({"gpu": {"count": 1}}, None, "1Gi"),
        (
            {**CPU, "gpu": {"count": 1}, "settings": {"kv_folder": "/dev/shm/sluice", "kv_host_memory": "8GiB"}},
            "/dev/shm/sluice",
            "12Gi",
        ),
    ],
)
def test_the_kv_cache_of_a_cpu_engine_is_a_file_that_outlives_the_container(engine, folder, size) -> None:
    objects = objects_from({"engine": engine})
    assert settings_of_pools(objects)[""].get("kv_folder") == folder
    for pod in engines(objects):
        mounts = {mount["mountPath"]: mount["name"] for mount in pod.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod.template["spec"]["volumes"]}
        # An emptyDir lives as long as its pod.
        expected = {"medium": "Memory"} | ({} if size is None else {"sizeLimit": size})
        assert volumes[mounts["/dev/shm"]]["emptyDir"] == expected


PHASES: dict[str, Any] = {
    "engine": CPU,
    "engines": [
        {"name": "prefill", "phase": "prefill", "replicas": 3, "autoscaling": {"kind": "hpa", "maxReplicas": 8}},
        {"name": "decode", "phase": "decode", "autoscaling": KEDA, "settings": {"max_batch_size": 128}},
        {"name": "v2", "replicas": 2, "settings": {"max_batch_size": 8}},
    ],
}


def test_each_pool_has_its_phase_and_settings() -> None:
    settings = settings_of_pools(objects_from(PHASES))
    assert {name: (each.get("phase"), each["model_version"]) for name, each in settings.items()} == {
        "prefill": ("prefill", ""),
        "decode": ("decode", ""),
        "v2": (None, "v2"),
    }
    assert {name: each.get("max_batch_size") for name, each in settings.items()} == {
        "prefill": None,
        "decode": 128,
        "v2": 8,
    }


def test_each_pool_has_its_autoscaler() -> None:
    objects = objects_from(PHASES)
    (by_cpu,) = kinds(objects, "HorizontalPodAutoscaler")
    kubernetes_validate.validate(by_cpu, "1.34", strict=True)
    (by_requests,) = kinds(objects, "ScaledObject")
    targets = [each["spec"]["scaleTargetRef"]["name"] for each in (by_cpu, by_requests)]
    assert targets == ["sluice-engine-prefill", "sluice-engine-decode"]
    assert (by_cpu["spec"]["maxReplicas"], by_requests["spec"]["maxReplicaCount"]) == (8, 6)
    replicas = {each["metadata"]["name"]: each["spec"].get("replicas") for each in kinds(objects, "Deployment")}
    # An autoscaler and Helm must not both set the number.
    assert [replicas[f"sluice-engine-{name}"] for name in ("prefill", "decode", "v2")] == [None, None, 2]


def trigger(values: dict[str, Any]) -> tuple[str, str]:
    """Query and threshold of the first pool with KEDA."""
    scaled = kinds(objects_from(values), "ScaledObject")[0]
    (prometheus,) = scaled["spec"]["triggers"]
    assert prometheus["metricType"] == "AverageValue"
    return prometheus["metadata"]["query"], prometheus["metadata"]["threshold"]


def test_requests_that_wait_at_the_routers_count_where_prompts_are_computed() -> None:
    def of(phase: str) -> tuple[str, str]:
        return trigger({"engines": [{"name": phase, "phase": phase, "autoscaling": KEDA}]})

    assert ["sluice_router_queue_requests" in of(phase)[0] for phase in ("both", "prefill", "decode")] == [
        True,
        True,
        False,
    ]
    assert [of(phase)[1] for phase in ("both", "prefill", "decode")] == ["48", "4", "48"]


def test_a_query_counts_the_pods_of_its_pool_only() -> None:
    def matched(values: dict[str, Any], *names: str) -> list[bool]:
        query, _ = trigger(values)
        pattern = re.search(r'sluice_engine_requests_active\{namespace="llm",pod=~"([^"]*)"', query)
        assert pattern
        return [bool(re.fullmatch(pattern[1], name)) for name in names]

    deployment = {"engines": [{"name": "a", "autoscaling": KEDA}]}
    names = ("sluice-engine-a-7f9c6d5b8-x2v4q", "sluice-engine-a-b-7f9c6d5b8-x2v4q", "sluice-engine-7f9c6d5b8-x2v4q")
    assert matched(deployment, *names) == [True, False, False]
    group = {"engine": {"multiNode": {"size": 2}, "autoscaling": KEDA}}
    assert matched(group, "sluice-engine-group-0", "sluice-engine-group-0-1") == [True, False]


def test_a_group_of_nodes_can_be_scaled() -> None:
    objects = objects_from({"engine": {"multiNode": {"size": 2}, "autoscaling": KEDA}})
    (group,) = kinds(objects, "LeaderWorkerSet")
    (scaled,) = kinds(objects, "ScaledObject")
    target = {"apiVersion": group["apiVersion"], "kind": group["kind"], "name": group["metadata"]["name"]}
    assert scaled["spec"]["scaleTargetRef"] == target
    assert "replicas" not in group["spec"]


@pytest.mark.parametrize(
    ("autoscaling", "problem"),
    [({"kind": "keda"}, "prometheusAddress"), ({"kind": "hpa"}, "measures the CPU")],
)
def test_an_autoscaler_that_cannot_work_is_refused(autoscaling, problem) -> None:
    with pytest.raises(HelmError, match=problem):
        render({"engine": {"autoscaling": autoscaling}})
