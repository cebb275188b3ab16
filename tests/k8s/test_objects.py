"""What the chart renders: valid for Kubernetes, the same each time, and selectors that select."""

from collections import Counter

import kubernetes_validate
import pytest
from helm_python import lint

from k8s.render import MANIFESTS, manifests
from tests.k8s.chart import CHART, NATIVE, VALUE_SETS, kinds, objects_of, pods, render, selects, values_of

VERSIONS = ("1.31", "1.34", "1.37")
INFO = 1
CRDS = {"LeaderWorkerSet", "ScaledObject", "PodMonitor", "PrometheusRule", "GRPCRoute"}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_strict_lint(name: str) -> None:
    result = lint(CHART, values_of(name), strict=True, namespace="llm")
    problems = [each for each in result["messages"] if each["severity"] > INFO]
    assert not problems


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", VALUE_SETS)
def test_native_objects_are_valid(name: str, version: str) -> None:
    for each in objects_of(name):
        if each["apiVersion"] in NATIVE:
            kubernetes_validate.validate(each, version, strict=True)
        else:
            assert each["kind"] in CRDS


@pytest.mark.parametrize("name", VALUE_SETS)
def test_two_renderings_are_equal(name: str) -> None:
    assert render(values_of(name)) == render(values_of(name))


def test_manifests_are_what_is_rendered() -> None:
    rendered = manifests()
    assert {file.name for file in MANIFESTS.iterdir()} == set(rendered)
    for name, text in rendered.items():
        assert (MANIFESTS / name).read_text() == text, "run: make manifests"


@pytest.mark.parametrize("name", VALUE_SETS)
def test_names_are_unique(name: str) -> None:
    count = Counter((each["kind"], each["metadata"]["name"]) for each in objects_of(name))
    assert max(count.values()) == 1
    assert all(len(key[1]) <= 63 for key in count)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_each_selector_selects_its_own_pods_and_no_others(name: str) -> None:
    objects = objects_of(name)
    all_pods = list(pods(objects))
    for each in all_pods:
        if each.owner["kind"] == "Deployment":
            selector = each.owner["spec"]["selector"]["matchLabels"]
            assert [pod for pod in all_pods if selects(selector, pod.labels)] == [each]
    for budget in kinds(objects, "PodDisruptionBudget"):
        found = {pod.component for pod in all_pods if selects(budget["spec"]["selector"]["matchLabels"], pod.labels)}
        assert found == {budget["metadata"]["name"].rpartition("-")[2]}
    for service in kinds(objects, "Service"):
        found = [pod for pod in all_pods if selects(service["spec"]["selector"], pod.labels)]
        assert {pod.component for pod in found} == {service["metadata"]["labels"]["app.kubernetes.io/component"]}
        # Only pods that listen.
        assert all(port["targetPort"] in pod.ports for pod in found for port in service["spec"]["ports"])


@pytest.mark.parametrize("name", VALUE_SETS)
def test_pods_are_restricted(name: str) -> None:
    for pod in pods(objects_of(name)):
        spec, container = pod.template["spec"], pod.container
        assert spec["securityContext"] | {"fsGroup": 10001} == spec["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 10001
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        assert spec["automountServiceAccountToken"] is False
        assert all("subPath" not in mount for mount in container["volumeMounts"])
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


def test_ranks_above_0_have_no_probes() -> None:
    leader, worker = [pod for pod in pods(objects_of("multi-node")) if pod.component == "engine"]
    assert leader.container["readinessProbe"]
    assert not {"startupProbe", "readinessProbe", "livenessProbe", "ports"} & set(worker.container)
    assert worker.container["command"] == leader.container["command"]


def test_gpus_are_requested_and_limited() -> None:
    (engine,) = [pod for pod in pods(objects_of("default")) if pod.component == "engine"]
    assert engine.container["resources"]["requests"]["nvidia.com/gpu"] == 1
    assert engine.container["resources"]["limits"]["nvidia.com/gpu"] == 1
    for pod in pods(objects_of("cpu-ipv6")):
        assert "nvidia.com/gpu" not in str(pod.container["resources"])


def test_only_the_job_has_a_token() -> None:
    assert {each["kind"] for each in objects_of("default")} & {"Role", "RoleBinding", "Job"} == set()
    (job,) = kinds(objects_of("keys-by-job"), "Job")
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is True
