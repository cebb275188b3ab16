"""The chart, rendered with each set of values, as plain objects."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

from k8s.render import LOADER

CHART = Path(__file__).parents[2] / "k8s" / "chart" / "sluice"
VALUES = CHART.parents[1] / "values"
RELEASE = "sluice"
NAMESPACE = "llm"
VALUE_SETS = ("default", *sorted(file.stem for file in VALUES.glob("*.yaml")))
NATIVE = (
    "v1",
    "apps/v1",
    "autoscaling/v2",
    "batch/v1",
    "networking.k8s.io/v1",
    "policy/v1",
    "rbac.authorization.k8s.io/v1",
)

Object = Mapping[str, Any]


def values_of(name: str) -> dict[str, Any]:
    return {} if name == "default" else dict(yaml.safe_load((VALUES / f"{name}.yaml").read_text()))


def render(values: Mapping[str, Any]) -> str:
    with Chart.load(CHART) as chart:
        rendered = chart.render(dict(values), name=RELEASE, namespace=NAMESPACE)
    return "".join(f"---\n{text}\n" for file, text in sorted(rendered.items()) if file.endswith(".yaml"))


def objects_from(values: Mapping[str, Any]) -> tuple[Object, ...]:
    return tuple(each for each in yaml.load_all(render(values), LOADER) if each)


@cache
def objects_of(name: str) -> tuple[Object, ...]:
    """All objects that the chart renders with this set of values."""
    return objects_from(values_of(name))


@dataclass(frozen=True)
class Pod:
    """A pod template, and the workload that owns it."""

    owner: Object
    template: Object
    component: str
    extra_labels: Mapping[str, str] = field(default_factory=dict)
    """Labels that the workload's controller sets."""

    @property
    def labels(self) -> dict[str, str]:
        return {**self.template["metadata"]["labels"], **self.extra_labels}

    @property
    def container(self) -> Object:
        return self.template["spec"]["containers"][0]  # type: ignore[no-any-return]

    @property
    def keeper(self) -> Object | None:
        """The container of the keeper, if the pod has one."""
        return next(
            (each for each in self.template["spec"].get("initContainers", ()) if each["name"] == "keeper"), None
        )

    @property
    def ports(self) -> dict[str, int]:
        return {each["name"]: each["containerPort"] for each in self.container.get("ports", ())}


def pods(objects: tuple[Object, ...]) -> Iterator[Pod]:
    """The pods of routers, engines, detokenizers and gateways."""
    for each in objects:
        if each["kind"] == "Deployment":
            yield _pod(each, each["spec"]["template"])
        if each["kind"] == "LeaderWorkerSet":
            group = each["spec"]["leaderWorkerTemplate"]
            for index, template in enumerate((group["leaderTemplate"], group["workerTemplate"])):
                yield _pod(each, template, {"leaderworkerset.sigs.k8s.io/worker-index": str(index)})


def _pod(owner: Object, template: Object, extra: Mapping[str, str] | None = None) -> Pod:
    return Pod(owner, template, template["metadata"]["labels"]["app.kubernetes.io/component"], extra or {})


def selects(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    return selector.items() <= labels.items()


def kinds(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [each for each in objects if each["kind"] == kind]
