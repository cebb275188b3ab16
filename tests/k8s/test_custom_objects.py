"""Custom objects are valid according to the validators of @kubernetes-models.

LeaderWorkerSet has no validator there: its fields are compared with those of its definition, and its pod templates are
validated as those of Kubernetes.
"""

import json
import shutil
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from tests.k8s.chart import NATIVE, Object, kinds, objects_of

PACKAGES = (
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
)
SCRIPT = Path(__file__).with_name("custom_objects.mjs")
CUSTOM = [each for each in objects_of("multi-node") if each["apiVersion"] not in NATIVE]
VALIDATED = [each for each in CUSTOM if each["kind"] != "LeaderWorkerSet"]
MISSING = [tool for tool in ("node", "npm") if shutil.which(tool) is None]

needs_node = pytest.mark.skipif(bool(MISSING), reason=f"missing: {', '.join(MISSING)}")
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("npm")
    quiet = ("--no-audit", "--no-fund", "--no-save", "--loglevel", "error")
    command = ["npm", "install", *quiet, *PACKAGES]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=100)
    except subprocess.TimeoutExpired:
        pytest.skip("npm does not get the validators in 100 s")
    if done.returncode:
        pytest.skip(f"npm cannot install the validators: {done.stderr.strip().splitlines()[:1]}")
    shutil.copy(SCRIPT, folder)
    return folder


def problems(packages: Path, objects: list[Object]) -> list[str | None]:
    command = ["node", str(packages / SCRIPT.name)]
    done = subprocess.run(command, input=json.dumps(objects), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@needs_node
def test_custom_objects_are_valid(packages: Path) -> None:
    assert {each["kind"] for each in VALIDATED} == {"ScaledObject", "PodMonitor", "PrometheusRule", "GRPCRoute"}
    assert problems(packages, VALIDATED) == [None] * len(VALIDATED)


@needs_node
def test_the_validators_refuse_wrong_values(packages: Path) -> None:
    wrong = {
        "ScaledObject": ("maxReplicaCount", "many"),
        "PodMonitor": ("podMetricsEndpoints", [{"port": 9100}]),
        "PrometheusRule": ("groups", [{"rules": []}]),
        "GRPCRoute": ("hostnames", ["not a host"]),
    }
    objects: list[Object] = []
    for each in VALIDATED:
        key, value = wrong[each["kind"]]
        objects.append({**each, "spec": {**each["spec"], key: value}})
    for each, problem in zip(VALIDATED, problems(packages, objects), strict=True):
        assert wrong[each["kind"]][0] in str(problem)


LEADER_WORKER_SET: dict[str, Any] = {
    "replicas": 1,
    "startupPolicy": ("LeaderCreated", "LeaderReady"),
    "rolloutStrategy": {
        "type": ("RollingUpdate",),
        "rollingUpdateConfiguration": {"partition": 0, "maxUnavailable": 1, "maxSurge": 0},
    },
    "networkConfig": {"subdomainPolicy": ("Shared", "UniquePerReplica")},
    "leaderWorkerTemplate": {
        "size": 1,
        "restartPolicy": ("RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"),
        "leaderTemplate": None,
        "workerTemplate": None,
    },
}
"""Fields of LeaderWorkerSet (leaderworkerset.x-k8s.io/v1): a number, an enumeration, an object, or a pod template."""


def unknown_fields(value: Object, definition: dict[str, Any]) -> list[str]:
    unknown = [key for key in value if key not in definition]
    for key in value.keys() & definition.keys():
        known = definition[key]
        if isinstance(known, dict):
            unknown += unknown_fields(value[key], known)
        elif isinstance(known, tuple):
            unknown += [] if value[key] in known else [f"{key}: {value[key]}"]
        elif isinstance(known, int):
            unknown += [] if isinstance(value[key], int) else [f"{key}: {value[key]}"]
    return unknown


def test_leader_worker_sets() -> None:
    (group,) = kinds(objects_of("multi-node"), "LeaderWorkerSet")
    assert unknown_fields(group["spec"], LEADER_WORKER_SET) == []
    for name in ("leaderTemplate", "workerTemplate"):
        template = deepcopy(group["spec"]["leaderWorkerTemplate"][name])
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "ranks"}, "template": template}
        kubernetes_validate.validate(pod, "1.34", strict=True)


def test_a_leader_worker_set_shares_no_name_with_a_service() -> None:
    """The controller creates a Service with the name of the set, and fails if another Service has this name."""
    (group,) = kinds(objects_of("multi-node"), "LeaderWorkerSet")
    assert group["metadata"]["name"] not in {
        each["metadata"]["name"] for each in kinds(objects_of("multi-node"), "Service")
    }
