"""What a team's cluster may ask for: each value reaches the objects that it is for, and no others."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_python import Chart, HelmError

from tests.k8s.chart import CHART, Object, kinds, objects_from, objects_of, pods, render

EXAMPLE = CHART.parents[1] / "examples" / "several-models"
SERVICES = {"router": "router", "engine": "engine", "detok": "detok", "gateway": "gatewayHttp"}


def spec_of(component: str, values: Mapping[str, Any], **common: Any) -> Mapping[str, Any]:
    """The pod's specification of a service with these values."""
    objects = objects_from(
        {"gatewayHttp": {"enabled": True}} | {SERVICES[component]: {"enabled": True, **values}}
        if component == "gateway"
        else {SERVICES[component]: values, **common}
    )
    (pod,) = [pod for pod in pods(objects) if pod.component == component]
    return pod.template["spec"]


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object:
    (found,) = [each for each in kinds(objects, kind) if each["metadata"]["name"] == name]
    return found


@pytest.mark.parametrize("component", SERVICES)
def test_fields_of_a_pod(component):
    container = {"name": "other", "image": "busybox"}
    spec = spec_of(
        component,
        {
            "initContainers": [container],
            "sidecars": [container],
            "envFrom": [{"secretRef": {"name": "keys"}}],
            "schedulerName": "volcano",
            "resourceClaims": [{"name": "gpu", "resourceClaimName": "one"}],
            "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"}],
            "podSecurityContext": {"fsGroup": 7, "runAsUser": None},
            "securityContext": {"readOnlyRootFilesystem": False},
        },
    )
    assert spec["initContainers"] == [container]
    assert spec["containers"][1:] == [container]
    assert spec["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]
    assert spec["schedulerName"] == "volcano"
    assert spec["resourceClaims"] == [{"name": "gpu", "resourceClaimName": "one"}]
    (constraint,) = spec["topologySpreadConstraints"]
    assert constraint["maxSkew"] == 2
    assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == component
    assert spec["securityContext"]["fsGroup"] == 7
    assert "runAsUser" not in spec["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"]
    security = spec["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] is False
    assert security["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("component", SERVICES)
def test_fields_of_a_workload(component):
    own = {"annotations": {"a": "b"}, "strategy": {"type": "Recreate"}}
    objects = objects_from(
        {"gatewayHttp": {"enabled": True}, SERVICES[component]: {"enabled": True, **own}}
        if component == "gateway"
        else {SERVICES[component]: own}
    )
    workload = named(objects, "Deployment", f"sluice-{component}")
    assert workload["metadata"]["annotations"] == {"a": "b"}
    assert workload["spec"]["strategy"] == {"type": "Recreate"}
    others = [each for each in kinds(objects, "Deployment") if each is not workload]
    assert all("annotations" not in each["metadata"] for each in others)


def test_common_labels_and_annotations_are_on_all_objects():
    objects = objects_of("team")
    own = [each for each in objects if each["metadata"]["name"] != "proxies"]
    assert all(each["metadata"]["labels"]["team"] == "language" for each in own)
    assert all(each["metadata"]["annotations"]["example.com/owner"] == "language-team" for each in own)
    assert all(pod.labels["team"] == "language" for pod in pods(objects))
    # Selectors cannot change, so they must not contain labels that may.
    assert all("team" not in pod.owner["spec"]["selector"]["matchLabels"] for pod in pods(objects))


def test_extra_objects_are_templates():
    assert named(objects_of("team"), "ConfigMap", "proxies")["data"] == {"HTTPS_PROXY": "http://proxy.llm.svc:3128"}


@pytest.mark.parametrize(("section", "name"), [("router", "sluice"), ("gatewayHttp", "sluice-gateway")])
def test_a_service_has_the_type_and_annotations_of_its_values(section, name):
    values = {
        "type": "LoadBalancer",
        "nodePort": 30080,
        "annotations": {"a": "b"},
        "labels": {"exposed": "yes"},
        "loadBalancerClass": "example.com/internal",
        "loadBalancerSourceRanges": ["10.0.0.0/8"],
        "externalTrafficPolicy": "Local",
    }
    enabled = {"enabled": True} if section == "gatewayHttp" else {}
    objects = objects_from({"gatewayHttp": {"enabled": True}} | {section: {**enabled, "service": values}})
    service = named(objects, "Service", name)
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert service["metadata"]["labels"]["exposed"] == "yes"
    assert service["spec"]["ports"][0]["nodePort"] == 30080
    fields = ("type", "loadBalancerClass", "loadBalancerSourceRanges", "externalTrafficPolicy")
    assert {field: service["spec"][field] for field in fields} == {field: values[field] for field in fields}
    others = [each for each in kinds(objects, "Service") if each is not service]
    assert {each["spec"].get("type", "ClusterIP") for each in others} == {"ClusterIP"}
    assert all("annotations" not in each["metadata"] for each in others)


def test_services_can_be_reached_from_outside():
    values = {"type": "NodePort", "nodePort": 30051, "annotations": {"a": "b"}, "externalTrafficPolicy": "Local"}
    objects = objects_from({"router": {"service": values, "admin": {"enabled": True, "tokensSecret": "admins"}}})
    service = named(objects, "Service", "sluice")
    assert service["metadata"]["annotations"] == {"a": "b"}
    assert service["spec"]["externalTrafficPolicy"] == "Local"
    assert [port.get("nodePort") for port in service["spec"]["ports"]] == [30051, None]
    balanced = named(objects_of("team"), "Service", "sluice")["spec"]
    assert (balanced["type"], balanced["loadBalancerSourceRanges"]) == ("LoadBalancer", ["10.0.0.0/8"])
    # The Service for clients that balance load themselves stays headless.
    assert named(objects, "Service", "sluice-router")["spec"]["clusterIP"] == "None"


def test_ingresses():
    ingress = {"enabled": True, "className": "nginx", "annotations": {"backend-protocol": "GRPC"}, "hosts": ["a", "b"]}
    objects = objects_from(
        {"router": {"ingress": ingress}, "gatewayHttp": {"enabled": True, "ingress": {"enabled": True}}}
    )
    grpc, http = (named(objects, "Ingress", name) for name in ("sluice", "sluice-gateway"))
    assert [rule["host"] for rule in grpc["spec"]["rules"]] == ["a", "b"]
    (path,) = grpc["spec"]["rules"][0]["http"]["paths"]
    assert path["backend"]["service"] == {"name": "sluice", "port": {"number": 50051}}
    (rule,) = http["spec"]["rules"]
    assert "host" not in rule
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "sluice-gateway", "port": {"number": 8000}}


def test_secrets_may_have_other_keys():
    router = {
        "tokens": {"secretName": "clients", "secretKey": "production"},
        "admin": {"enabled": True, "tokensSecret": "admins", "tokensKey": "all"},
    }
    objects = objects_from({"router": router, "model": {"hub": {"tokenSecret": "hub", "tokenKey": "read"}}})
    settings = yaml.safe_load(named(objects, "ConfigMap", "sluice")["data"]["router.yaml"])
    assert settings["tokens_file"] == "/etc/sluice/tokens/production"
    assert settings["admin_tokens_file"] == "/etc/sluice/admin-tokens/all"
    (router_pod,) = [pod for pod in pods(objects) if pod.component == "router"]
    assert {"name": "HF_TOKEN_PATH", "value": "/etc/sluice/hub/read"} in router_pod.container["env"]


def test_a_chat_template_is_a_file_of_the_routers():
    config = named(objects_of("team"), "ConfigMap", "sluice")["data"]
    assert yaml.safe_load(config["router.yaml"])["chat_template"] == "/etc/sluice/config/chat_template.jinja"
    assert config["chat_template.jinja"].startswith("{% for message in messages %}")
    assert "chat_template" not in config["engine.yaml"]


def test_a_model_from_a_bucket_is_copied_first():
    copies = {pod.component: pod.template["spec"].get("initContainers", []) for pod in pods(objects_of("team"))}
    assert copies["gateway"] == []
    for component in ("router", "engine", "detok"):
        command = copies[component][0]["command"]
        assert command[3:5] == ["s3://models/qwen3-0.6b", "/models/qwen3-0.6b"]
        assert ("--exclude=*.safetensors" in command) == (component != "engine")
        assert copies[component][0]["envFrom"] == [{"secretRef": {"name": "bucket"}}]


@pytest.mark.parametrize(
    "model", [{"source": "pvc", "pvc": "models"}, {"source": "hub", "hub": {"cachePvc": "models"}}]
)
def test_a_claim_can_be_created_and_stays(model):
    created = {**model, "createPvc": {"enabled": True, "size": "20Gi", "storageClassName": "nfs"}}
    (claim,) = kinds(objects_from({"model": created}), "PersistentVolumeClaim")
    assert claim["metadata"]["name"] == "models"
    assert claim["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "storageClassName": "nfs",
        "resources": {"requests": {"storage": "20Gi"}},
    }
    assert kinds(objects_from({"model": model}), "PersistentVolumeClaim") == []


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"model": {"source": "s3"}}, "model.s3.uri"),
        ({"model": {"createPvc": {"enabled": True}}}, "model.pvc or model.hub.cachePvc"),
        ({"model": {"source": "image", "image": "a", "createPvc": {"enabled": True}}}, "model.source: pvc or hub"),
        ({"gatewayHttp": {"ingress": {"enabled": True}}}, "gatewayHttp.enabled"),
        ({"router": {"service": {"type": "ExternalName"}}}, "type"),
    ],
)
def test_values_that_cannot_work_are_refused(values, problem):
    with pytest.raises(HelmError, match=problem):
        render(values)


def test_one_release_serves_several_models(tmp_path: Path):
    folder = shutil.copytree(EXAMPLE, tmp_path / "models")
    # As `helm dependency build` does.
    shutil.copytree(CHART, folder / "charts" / "sluice")
    with Chart.load(folder) as chart:
        rendered = chart.render(yaml.safe_load((EXAMPLE / "values.yaml").read_text()), name="llm", namespace="llm")
    objects = tuple(
        each for file, text in rendered.items() if file.endswith(".yaml") for each in yaml.safe_load_all(text) if each
    )
    assert {each["metadata"]["name"] for each in kinds(objects, "Deployment")} == {
        f"llm-{model}-{service}" for model in ("chat", "code") for service in ("router", "engine", "detok", "gateway")
    }
    for model, path in (("chat", "Qwen/Qwen3-0.6B"), ("code", "/models/qwen2.5-coder")):
        settings = yaml.safe_load(named(objects, "ConfigMap", f"llm-{model}")["data"]["router.yaml"])
        assert settings["model"] == path
        assert settings["engines"] == [f"dns://llm-{model}-engine.llm.svc.cluster.local:7000"]
    pods_of = {pod.owner["metadata"]["name"]: pod for pod in pods(objects)}
    for name, pod in pods_of.items():
        selector = pod.owner["spec"]["selector"]["matchLabels"].items()
        assert [other for other, each in pods_of.items() if selector <= each.labels.items()] == [name]
