"""The keeper of each engine: its container, its settings, and who may reach it."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError

from sluice.settings.keeper import KeeperSettings
from sluice.settings.read import read_settings
from sluice.settings.services import EngineSettings
from tests.k8s.chart import Object, Pod, kinds, objects_from, objects_of, pods, render
from tests.k8s.test_network import connects
from tests.k8s.test_settings import read

ROOT = Path(__file__).parents[2]
CPU: dict[str, Any] = {"gpu": {"count": 0}, "keeper": {"enabled": True}}
GIB = 1 << 30


def engines(objects: tuple[Object, ...]) -> list[Pod]:
    return [pod for pod in pods(objects) if pod.component == "engine"]


def keeper_of(pod: Pod) -> Object:
    assert pod.keeper is not None
    return pod.keeper


def environment(container: Object, pod_ip: str = "10.1.2.3") -> dict[str, str]:
    known = {"$(POD_NAME)": "the-pod", "$(POD_IP)": pod_ip}
    found = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    for variable, text in known.items():
        found = {name: value.replace(variable, text) for name, value in found.items()}
    return found


def settings_of(pod: Pod) -> KeeperSettings:
    return read_settings(KeeperSettings, [], environment(keeper_of(pod)))


def with_engine(**values: Any) -> tuple[Object, ...]:
    return objects_from({"engine": {**CPU, **values}})


def test_without_the_value_there_is_no_keeper() -> None:
    assert "keeper" not in render({})


def test_keeper_and_engine_agree(tmp_path: Path) -> None:
    objects = objects_of("prefill-decode")
    for pod in engines(objects):
        keeper, engine = settings_of(pod), read(pod, objects, tmp_path)
        assert isinstance(engine, EngineSettings)
        assert (str(keeper.kv_folder), keeper.listen) == (engine.pool_folder, engine.kv_keeper)
        assert keeper.keys == engine.keys
        assert keeper.id == engine.id
        ports = {each["name"]: each["containerPort"] for each in keeper_of(pod)["ports"]}
        assert keeper.listen == f"tcp://10.1.2.3:{ports['keeper']}"
        assert keeper.metrics_port == ports["keeper-metrics"]
        # They have one network.
        assert not set(ports.values()) & set(pod.ports.values())


def test_keeper_and_engine_have_one_memory_and_the_same_keys() -> None:
    (pod,) = engines(with_engine())
    keeper = keeper_of(pod)
    own, shared = ({mount["mountPath"]: mount for mount in each["volumeMounts"]} for each in (keeper, pod.container))
    assert set(own) == {"/dev/shm", "/etc/sluice/keys/secret", "/etc/sluice/keys/public"}
    assert all(shared[path] == mount for path, mount in own.items())
    # Neither container has a user of its own.
    assert all("runAsUser" not in each["securityContext"] for each in (keeper, pod.container))
    assert keeper["image"] == pod.container["image"]


def test_the_keeper_starts_before_the_engine_and_ends_after_it() -> None:
    bucket = {"source": "s3", "s3": {"uri": "s3://models"}}
    objects = objects_from({"model": bucket, "engine": {**CPU, "initContainers": [{"name": "mine", "image": "a"}]}})
    (pod,) = engines(objects)
    assert [each["name"] for each in pod.template["spec"]["initContainers"]] == ["model", "keeper", "mine"]
    assert keeper_of(pod)["restartPolicy"] == "Always"


def test_probes_ask_the_keepers_own_port() -> None:
    (pod,) = engines(with_engine())
    probes = {name: each["httpGet"] for name, each in keeper_of(pod).items() if name.endswith("Probe")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/livez",
        "readinessProbe": "/readyz",
        "livenessProbe": "/livez",
    }
    assert {probe["port"] for probe in probes.values()} == {"keeper-metrics"}


def test_without_keys_the_keeper_accepts_any_engine() -> None:
    (pod,) = engines(objects_from({"ring": {"keys": {"enabled": False}}, "engine": CPU}))
    assert (settings_of(pod).keys, settings_of(pod).insecure_ring) == (None, True)
    assert [mount["name"] for mount in keeper_of(pod)["volumeMounts"]] == ["shm"]


def test_addresses_may_be_ipv6() -> None:
    (pod,) = engines(objects_from({"ring": {"ipFamily": "IPv6"}, "engine": CPU}))
    keeper, engine = (environment(each, "2001:db8::7") for each in (keeper_of(pod), pod.container))
    assert keeper["SLUICE_KEEPER_LISTEN"] == engine["SLUICE_ENGINE_KV_KEEPER"] == "tcp://[2001:db8::7]:7001"
    assert keeper["SLUICE_KEEPER_METRICS_HOST"] == "::"


@pytest.mark.parametrize(
    ("disk", "volume", "blocks"),
    [
        ({"kind": "emptyDir", "size": "10Gi"}, {"emptyDir": {"sizeLimit": "10Gi"}}, 9 * GIB),
        ({"kind": "claim", "size": "1.5T"}, {"ephemeral": (None, "1.5T")}, 1_350_000_000_000),
        ({"kind": "claim", "storageClassName": "fast"}, {"ephemeral": ("fast", "64Gi")}, int(57.6 * GIB)),
    ],
)
def test_the_disk_is_a_volume_with_some_room_beside_the_blocks(disk, volume, blocks) -> None:
    objects = with_engine(keeper={"enabled": True, "disk": disk})
    (pod,) = engines(objects)
    (found,) = [each for each in pod.template["spec"]["volumes"] if each["name"] == "keeper-disk"]
    if "ephemeral" in volume:
        storage_class, size = volume["ephemeral"]
        spec = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
        spec |= {} if storage_class is None else {"storageClassName": storage_class}
        volume = {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}}
    assert found == {"name": "keeper-disk", **volume}
    (mount,) = [each for each in keeper_of(pod)["volumeMounts"] if each["name"] == "keeper-disk"]
    settings = settings_of(pod)
    # The keeper refuses a folder that others can enter, as they can a volume's root.
    assert settings.disk_folder is not None
    assert str(settings.disk_folder.parent) == mount["mountPath"]
    assert settings.disk_bytes == blocks
    requested = keeper_of(pod)["resources"]["requests"].get("ephemeral-storage")
    assert requested == (disk["size"] if disk["kind"] == "emptyDir" else None)
    for each in kinds(objects, "Deployment"):
        kubernetes_validate.validate(each, "1.31", strict=True)


def test_a_pool_may_have_none_or_another_port() -> None:
    pools = [{"name": "a"}, {"name": "b", "keeper": {"port": 7005}}, {"name": "c", "keeper": {"enabled": False}}]
    objects = objects_from({"engine": CPU, "engines": pools})
    own = {pod.owner["metadata"]["name"]: pod for pod in engines(objects)}
    assert {name: pod.keeper is not None for name, pod in own.items()} == {
        "sluice-engine-a": True,
        "sluice-engine-b": True,
        "sluice-engine-c": False,
    }
    assert "SLUICE_ENGINE_KV_KEEPER" not in environment(own["sluice-engine-c"].container)
    for port in (7001, 7005):
        assert connects(objects, own["sluice-engine-a"], own["sluice-engine-b"], port)


def test_only_engines_reach_keepers() -> None:
    objects = objects_from({"engine": CPU, "gatewayHttp": {"enabled": True}})
    by_component = {pod.component: pod for pod in pods(objects)}
    engine = by_component["engine"]
    for component, pod in by_component.items():
        assert connects(objects, pod, engine, 7001) is (component == "engine")
        assert connects(objects, engine, pod, 7001) is (component == "engine")
    assert not connects(objects, engine, engine, 7000)
    without = objects_from({"engine": {"gpu": {"count": 0}}})
    (engine,) = engines(without)
    assert not connects(without, engine, engine, 7001)


def test_keepers_are_scraped() -> None:
    (policy,) = [each for each in kinds(with_engine(), "NetworkPolicy") if each["metadata"]["name"] == "sluice-engine"]
    assert [{"port": 9100, "protocol": "TCP"}, {"port": 9101, "protocol": "TCP"}] in [
        rule["ports"] for rule in policy["spec"]["ingress"]
    ]
    (monitor,) = kinds(objects_of("prefill-decode"), "PodMonitor")
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["metrics", "keeper-metrics"]
    (monitor,) = kinds(objects_of("multi-node"), "PodMonitor")
    assert [each["port"] for each in monitor["spec"]["podMetricsEndpoints"]] == ["metrics"]


def test_on_a_gpu_the_file_has_the_host_pool() -> None:
    values = {"engine": {"settings": {"kv_host_memory": "8GiB"}, "keeper": {"enabled": True}}}
    (config,) = kinds(objects_from(values), "ConfigMap")
    assert yaml.safe_load(config["data"]["engine.yaml"])["kv_folder"] == "/dev/shm/sluice"


@pytest.mark.parametrize(
    ("engine", "problem"),
    [
        ({"gpu": {"count": 1}}, "kv_host_memory"),
        ({"gpu": {"count": 2}, "settings": {"kv_host_memory": "8GiB"}}, "one rank.*tensor_parallel 2"),
        ({"gpu": {"count": 1}, "multiNode": {"size": 2}}, "one rank"),
        ({"settings": {"tensor_parallel": 2}}, "one rank"),
        ({"settings": {"kv_folder": "none"}}, r"below /dev/shm \(got none\)"),
        ({"settings": {"kv_folder": "/tmp/blocks"}}, "below /dev/shm"),
        ({"settings": {"kv_fetch": False}}, "kv_fetch"),
    ],
)
def test_an_engine_without_a_file_for_a_keeper_is_refused(engine: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(HelmError, match=problem):
        render({"engine": {**CPU, **engine}})


@pytest.mark.parametrize("size", ["64", "64 Gi", "1e3G", "G"])
def test_a_size_that_is_not_one_is_refused(size: str) -> None:
    with pytest.raises(HelmError, match="size"):
        render({"engine": {**CPU, "keeper": {"enabled": True, "disk": {"kind": "claim", "size": size}}}})


def test_the_image_of_engines_has_what_the_keeper_needs() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert set(extras["keeper"]) <= set(extras["engine"])
