"""The rendered objects: valid for Kubernetes, reproducible, and with selectors that match."""

from collections import Counter

import kubernetes_validate
import pytest
from helm_python import lint

from k8s.render import MANIFESTS, manifests
from tests.k8s.chart import CHART, NATIVE, VALUE_SETS, kinds, objects_from, objects_of, pods, render, selects, values_of

VERSIONS = ("1.31", "1.34", "1.37")
INFO = 1
CRDS = {"LeaderWorkerSet", "ScaledObject", "PodMonitor", "PrometheusRule", "GRPCRoute", "HTTPRoute"}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_strict_lint(name: str) -> None:
    result = lint(CHART, values_of(name), strict=True, namespace="llm")
    problems = [each for each in result["messages"] if each["severity"] > INFO]
    assert not problems


@pytest.mark.quick(6)
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


def test_committed_manifests_match_the_chart() -> None:
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
        selected = {pod.component for pod in all_pods if selects(budget["spec"]["selector"]["matchLabels"], pod.labels)}
        assert selected == {budget["metadata"]["name"].rpartition("-")[2]}
    for service in kinds(objects, "Service"):
        selected = [pod for pod in all_pods if selects(service["spec"]["selector"], pod.labels)]
        assert {pod.component for pod in selected} == {service["metadata"]["labels"]["app.kubernetes.io/component"]}
        # Only pods that listen.
        assert all(port["targetPort"] in pod.ports for pod in selected for port in service["spec"]["ports"])


# The values "team" override the security context.
@pytest.mark.parametrize("name", [name for name in VALUE_SETS if name != "team"])
def test_pods_are_restricted(name: str) -> None:
    for pod in pods(objects_of(name)):
        spec, own = pod.template["spec"], [pod.container, *filter(None, [pod.keeper])]
        assert spec["securityContext"] | {"fsGroup": 10001} == spec["securityContext"]
        assert spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["runAsUser"] == 10001
        for container in own:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
        assert spec["automountServiceAccountToken"] is False
        mounts = [mount for container in own for mount in container["volumeMounts"]]
        assert all("subPath" not in mount for mount in mounts)
        assert {mount["name"] for mount in mounts} == {volume["name"] for volume in spec["volumes"]}


@pytest.mark.parametrize("name", VALUE_SETS)
def test_compilers_keep_their_caches_in_a_volume_that_outlives_the_container(name: str) -> None:
    for pod in pods(objects_of(name)):
        caches = {each["name"]: each["value"] for each in pod.container["env"] if each["name"].endswith("_CACHE_DIR")}
        compilers = {"NUMBA_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"}
        assert set(caches) == (compilers if pod.component == "engine" else set())
        mounts = {mount["mountPath"]: mount for mount in pod.container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod.template["spec"]["volumes"]}
        for path in caches.values():
            mount = mounts[path.rpartition("/")[0]]
            assert not mount.get("readOnly")
            assert "emptyDir" in volumes[mount["name"]]


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


def test_only_the_job_has_a_service_account_token() -> None:
    assert {each["kind"] for each in objects_of("default")} & {"Role", "RoleBinding", "Job"} == set()
    (job,) = kinds(objects_of("keys-by-job"), "Job")
    (account,) = job["spec"]["template"]["spec"]["volumes"]
    assert {next(iter(each)) for each in account["projected"]["sources"]} == {
        "serviceAccountToken",
        "configMap",
        "downwardAPI",
    }
    for pod in pods(objects_of("keys-by-job")):
        assert "serviceAccountToken" not in str(pod.template)


UNITS = {"m": 1e-3, "Mi": 2**20, "Gi": 2**30}


def quantity(text: str | int) -> float:
    digits = str(text).rstrip("".join(UNITS))
    return float(digits) * UNITS.get(str(text)[len(digits) :], 1)


@pytest.mark.parametrize("name", VALUE_SETS)
def test_no_request_exceeds_its_limit(name: str) -> None:
    for container in (each for pod in pods(objects_of(name)) for each in (pod.container, pod.keeper) if each):
        limits = container["resources"]["limits"]
        for resource, text in container["resources"]["requests"].items():
            assert quantity(text) <= quantity(limits.get(resource, text)), resource
        assert {"cpu", "memory"} <= limits.keys()


def test_routers_find_pools_of_one_node_and_of_several() -> None:
    pools = [{"name": "small"}, {"name": "large", "multiNode": {"size": 2}}]
    rendered = objects_from({"engines": pools})
    service = next(each for each in kinds(rendered, "Service") if each["metadata"]["name"] == "sluice-engine")
    selected = [pod for pod in pods(rendered) if selects(service["spec"]["selector"], pod.labels)]
    assert [pod.labels["sluice.dev/pool"] for pod in selected] == ["small", "large"]
    assert selected[1].labels["leaderworkerset.sigs.k8s.io/worker-index"] == "0"


def test_ranks_have_the_time_to_drain() -> None:
    for pod in pods(objects_of("multi-node")):
        if pod.component == "engine":
            environment = {each["name"]: each.get("value") for each in pod.container["env"]}
            seconds = int(environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"])
            assert 60 < seconds < pod.template["spec"]["terminationGracePeriodSeconds"]


def test_a_digest_belongs_to_its_repository() -> None:
    digest = "sha256:" + "0" * 64
    images = {pod.component: pod.container["image"] for pod in pods(objects_from({"image": {"digest": digest}}))}
    assert images == {
        "router": f"sluice@{digest}",
        "detok": f"sluice@{digest}",
        "engine": "sluice-engine:0.1.0",
    }


def test_with_tls_the_protocol_is_not_h2c() -> None:
    for name, protocol in (("default", "kubernetes.io/h2c"), ("multi-node", None)):
        (service,) = [each for each in kinds(objects_of(name), "Service") if each["metadata"]["name"] == "sluice"]
        assert {port.get("appProtocol") for port in service["spec"]["ports"]} == {protocol}


def test_detokenizers_scale_by_their_longest_queue() -> None:
    (scaled,) = kinds(objects_of("multi-node"), "ScaledObject")
    prometheus = next(each for each in scaled["spec"]["triggers"] if each["type"] == "prometheus")
    # AverageValue, the default, would divide the maximum by the number of pods.
    assert prometheus["metricType"] == "Value"
    assert prometheus["metadata"]["query"].startswith("max(")
    (deployment,) = [
        each for each in kinds(objects_of("multi-node"), "Deployment") if "detok" in each["metadata"]["name"]
    ]
    assert "replicas" not in deployment["spec"]
