"""NetworkPolicies as a graph: exactly the hops of the ring are allowed, as ingress and as egress."""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest

from sluice.lanes.keys import SENDERS
from tests.k8s.chart import VALUE_SETS, Object, Pod, kinds, objects_of, pods, selects, values_of

WITH_POLICIES = [name for name in VALUE_SETS if values_of(name).get("networkPolicy", {}).get("enabled", True)]


def allowed(rules: Iterable[Object], side: str, peer_labels: dict[str, str], port: int) -> bool:
    return any(_peer(rule.get(side), peer_labels) and _port(rule.get("ports"), port) for rule in rules)


def _peer(peers: Any, labels: dict[str, str]) -> bool:
    if not peers:
        return True
    return any(
        "namespaceSelector" not in each and selects(each["podSelector"]["matchLabels"], labels) for each in peers
    )


def _port(ports: Any, port: int) -> bool:
    return not ports or any(each["port"] == port for each in ports)


def connects(objects: tuple[Object, ...], sender: Pod, receiver: Pod, port: int) -> bool:
    policies = [each["spec"] for each in kinds(objects, "NetworkPolicy")]
    (out,) = [each for each in policies if selects(each["podSelector"]["matchLabels"], sender.labels)]
    (into,) = [each for each in policies if selects(each["podSelector"]["matchLabels"], receiver.labels)]
    leaves = allowed(out["egress"], "to", receiver.labels, port)
    return leaves and allowed(into["ingress"], "from", sender.labels, port)


def policy_of(name: str, labels: dict[str, str]) -> Object:
    policies = [each["spec"] for each in kinds(objects_of(name), "NetworkPolicy")]
    (policy,) = [each for each in policies if selects(each["podSelector"]["matchLabels"], labels)]
    return policy


def router_policy(name: str) -> Object:
    router = next(pod for pod in pods(objects_of(name)) if pod.component == "router")
    return policy_of(name, router.labels)


@pytest.mark.parametrize("name", WITH_POLICIES)
def test_the_ring_port_is_open_only_for_the_hops_of_the_ring(name: str) -> None:
    objects = objects_of(name)
    serving = [pod for pod in pods(objects) if "ring" in pod.ports]
    for sender, receiver in product(serving, serving):
        hop = sender.component in SENDERS[receiver.component]  # type: ignore[index]
        ranks = sender.component == receiver.component == "engine" and name == "multi-node"
        assert connects(objects, sender, receiver, receiver.ports["ring"]) is (hop or ranks)


@pytest.mark.parametrize("name", WITH_POLICIES)
def test_services_do_not_call_each_other_by_other_ports(name: str) -> None:
    objects = objects_of(name)
    serving = [pod for pod in pods(objects) if pod.ports]
    for sender, receiver in product(serving, serving):
        if name == "multi-node" and sender.component == receiver.component == "engine":
            continue
        for port in set(receiver.ports) - {"ring"}:
            client = (sender.component, receiver.component, port) == ("gateway", "router", "grpc")
            assert connects(objects, sender, receiver, receiver.ports[port]) is client


def test_ranks_of_an_engine_reach_each_other_on_every_port() -> None:
    objects = objects_of("multi-node")
    leader, worker = [pod for pod in pods(objects) if pod.component == "engine"]
    assert connects(objects, worker, leader, 29500)
    assert connects(objects, leader, worker, 41234)


def test_pods_outside_the_release() -> None:
    """By default all pods may call gRPC and read metrics, but no pod may call AdminService."""
    stranger = {"app": "another"}
    for name, open_to_all in (("default", True), ("multi-node", False)):
        router = router_policy(name)
        assert allowed(router["ingress"], "from", stranger, 50051) is open_to_all
        assert allowed(router["ingress"], "from", stranger, 9100) is open_to_all
        assert not allowed(router["ingress"], "from", stranger, 7000)
        assert not allowed(router["ingress"], "from", stranger, 50061)


def test_the_gateway_may_call_routers_and_be_called_by_clients() -> None:
    by_component = {pod.component: pod for pod in pods(objects_of("http"))}
    gateway, router = by_component["gateway"], by_component["router"]
    for policy in (policy_of("http", gateway.labels), policy_of("http", router.labels)):
        assert not allowed(policy["ingress"], "from", {"app": "another"}, 8000)
    assert allowed(policy_of("http", gateway.labels)["ingress"], "from", {"app": "chat"}, 8000)
    assert not allowed(policy_of("http", gateway.labels)["egress"], "to", router.labels, 7000)


def test_the_test_pod_may_call_routers() -> None:
    (test,) = kinds(objects_of("multi-node"), "Pod")
    router = next(pod for pod in pods(objects_of("multi-node")) if pod.component == "router")
    assert allowed(router_policy("multi-node")["ingress"], "from", test["metadata"]["labels"], 50051)
    policy = policy_of("multi-node", test["metadata"]["labels"])
    assert allowed(policy["egress"], "to", router.labels, 50051)
    assert not allowed(policy["egress"], "to", router.labels, 7000)
    assert "ingress" not in policy


def test_the_job_of_the_keys_may_call_only_the_kubernetes_api() -> None:
    (job,) = kinds(objects_of("keys-by-job"), "Job")
    policy = policy_of("keys-by-job", job["spec"]["template"]["metadata"]["labels"])
    assert allowed(policy["egress"], "to", {}, 443)
    assert not allowed(policy["egress"], "to", {}, 7000)
    assert "ingress" not in policy
