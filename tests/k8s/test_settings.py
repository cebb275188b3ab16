"""Each pod's environment and settings file, read by the settings class of the service itself."""

from pathlib import Path

import pytest

from sluice.settings.gateway import GatewaySettings
from sluice.settings.process import ProcessSettings
from sluice.settings.read import read_settings
from sluice.settings.services import DetokenizerSettings, EngineSettings, RouterSettings, ServiceSettings
from tests.k8s.chart import VALUE_SETS, Object, Pod, kinds, objects_of, pods

CLASSES: dict[str, type[ProcessSettings]] = {
    "router": RouterSettings,
    "engine": EngineSettings,
    "detok": DetokenizerSettings,
    "gateway": GatewaySettings,
}
CONFIG = "/etc/sluice/config/"


def read(pod: Pod, objects: tuple[Object, ...], folder: Path) -> ProcessSettings:
    """Reads the settings like the service in this pod, with its settings file below `folder`."""
    config = next(each for each in kinds(objects, "ConfigMap") if "router.yaml" in each["data"])
    for name, text in config["data"].items():
        (folder / name).write_text(text)
    ipv6 = "[$(POD_IP)]" in str(pod.container["env"])
    known = {"POD_NAME": "the-pod", "POD_IP": "2001:db8::7" if ipv6 else "10.1.2.3"}
    environment = {}
    for each in pod.container["env"]:
        value = known.get(each["name"], each.get("value", "from elsewhere"))
        for name, text in known.items():
            value = value.replace(f"$({name})", text)
        environment[each["name"]] = value.replace(CONFIG, f"{folder}/")
    return read_settings(CLASSES[pod.component], [], environment)


@pytest.fixture(params=VALUE_SETS)
def rendered(request: pytest.FixtureRequest, tmp_path: Path) -> list[tuple[Pod, ProcessSettings]]:
    objects = objects_of(request.param)
    return [(pod, read(pod, objects, tmp_path)) for pod in pods(objects)]


def mounted(pod: Pod, path: str) -> bool:
    return any(Path(path).is_relative_to(mount["mountPath"]) for mount in pod.container["volumeMounts"])


def test_services_read_the_settings_and_agree_on_ports(rendered: list[tuple[Pod, ProcessSettings]]) -> None:
    for pod, settings in rendered:
        assert settings.id == "the-pod"
        if pod.ports:
            assert settings.metrics_port == pod.ports["metrics"]
        if pod.ports and isinstance(settings, ServiceSettings):
            assert settings.listen.endswith(f":{pod.ports['ring']}")
        if isinstance(settings, GatewaySettings):
            assert settings.port == pod.ports["http"]
        if isinstance(settings, RouterSettings):
            assert (settings.port, settings.admin_port) == (pod.ports["grpc"], pod.ports.get("admin"))


def test_addresses_are_of_one_family(rendered: list[tuple[Pod, ProcessSettings]]) -> None:
    ipv6 = any("tcp://[" in str(pod.container["env"]) for pod, _ in rendered)
    for _, settings in rendered:
        any_host = "::" if ipv6 else "0.0.0.0"
        assert settings.metrics_host == any_host
        if isinstance(settings, RouterSettings | GatewaySettings):
            assert settings.host == any_host


def test_files_are_mounted(rendered: list[tuple[Pod, ProcessSettings]]) -> None:
    for pod, settings in rendered:
        files: list[str | None] = []
        if isinstance(settings, ServiceSettings):
            files += [settings.model] if settings.model.startswith("/") else []
            keys = settings.keys
            files += [] if keys is None else [f"{keys}/secret/{settings.role}.key", f"{keys}/public/x.key"]
        files += [each["value"] for each in pod.container["env"] if each["name"] == "HF_TOKEN_PATH"]
        if isinstance(settings, RouterSettings):
            of_router = (settings.tls_certificate, settings.tls_key, settings.tls_client_ca, settings.tokens_file)
            files += [*of_router, settings.admin_tokens_file]
        if isinstance(settings, GatewaySettings):
            files += [settings.tls_certificate, settings.tls_key, settings.router_ca]
        assert all(mounted(pod, file) for file in files if file is not None), files


def test_the_grace_period_covers_the_drain(rendered: list[tuple[Pod, ProcessSettings]]) -> None:
    for pod, settings in rendered:
        hook = pod.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        assert pod.template["spec"]["terminationGracePeriodSeconds"] >= hook + settings.drain_timeout + 10


def test_probes_ask_the_metrics_port(rendered: list[tuple[Pod, ProcessSettings]]) -> None:
    for pod, _ in rendered:
        probes = {name: probe["httpGet"] for name, probe in pod.container.items() if name.endswith("Probe")}
        assert all(probe["port"] == "metrics" for probe in probes.values())
        if probes:
            paths = {name: probe["path"] for name, probe in probes.items()}
            assert paths == {"startupProbe": "/livez", "readinessProbe": "/readyz", "livenessProbe": "/livez"}


def test_ranks_are_as_many_as_gpus(rendered: list[tuple[Pod, ProcessSettings]]) -> None:
    for pod, settings in rendered:
        if not isinstance(settings, EngineSettings):
            continue
        gpus = int(pod.container["resources"]["limits"].get("nvidia.com/gpu", 0))
        claims = pod.container["resources"].get("claims")
        assert settings.device == ("cuda" if gpus or claims else "cpu")
        nodes = 1
        if pod.owner["kind"] == "LeaderWorkerSet":
            nodes = pod.owner["spec"]["leaderWorkerTemplate"]["size"]
            command = pod.container["command"]
            assert int(command[command.index("--nproc-per-node") + 1]) == max(1, gpus)
        assert settings.tensor_parallel == nodes * max(1, gpus)


def test_routers_resolve_the_headless_services() -> None:
    objects = objects_of("default")
    services = kinds(objects, "Service")
    headless = {each["metadata"]["name"] for each in services if each["spec"].get("clusterIP") == "None"}
    (config,) = kinds(objects, "ConfigMap")
    for component in ("engine", "detok"):
        assert f"sluice-{component}" in headless
        assert f"dns://sluice-{component}.llm.svc.cluster.local:7000" in config["data"]["router.yaml"]


def test_the_gateway_finds_the_routers_and_trusts_their_certificates() -> None:
    (config,) = kinds(objects_of("http"), "ConfigMap")
    assert "dns:///sluice-router.llm.svc.cluster.local:50051" in config["data"]["gateway.yaml"]
    headless = {
        each["metadata"]["name"] for each in kinds(objects_of("http"), "Service") if "clusterIP" in each["spec"]
    }
    assert "sluice-router" in headless
