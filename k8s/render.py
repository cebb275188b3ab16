"""Writes the generated files in k8s: the settings in the chart's schema, and manifests/ for use without Helm.

    make manifests

tests/k8s fails if these files are out of date. With a file of values, prints the objects of that release instead:

    python -m k8s.render my-values.yaml --name sluice --namespace llm
"""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

try:
    from helm_python import Chart, HelmError
except ModuleNotFoundError as error:
    raise SystemExit("python -m k8s.render needs the extra dev: pip install -e '.[dev]'") from error

from sluice.settings.describe import Setting, settings_of
from sluice.settings.services import SERVICES

FOLDER = Path(__file__).parent
CHART = FOLDER / "chart" / "sluice"
SCHEMA = CHART / "values.schema.json"
EXAMPLES = FOLDER / "values"
MANIFESTS = FOLDER / "manifests"
NAME, NAMESPACE = "sluice", "llm"
TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", dict: "object", tuple: "array"}
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader, if available, because it is ten times as fast."""
POD_DEPENDENT = {"id", "listen", "config"}
"""Settings that differ between pods; the chart sets them by environment variables."""


def schema_with_settings() -> str:
    """The schema, with the settings of each service in `$defs`."""
    schema = json.loads(SCHEMA.read_text())
    schema["$defs"] = {
        f"{cls.role}Settings": {
            "type": "object",
            "additionalProperties": False,
            "properties": {
                name: {"type": _types(setting), "description": setting.description}
                for name, setting in settings_of(cls).items()
                if name not in POD_DEPENDENT and not setting.launcher_only
            },
        }
        for cls in SERVICES.values()
    }
    return json.dumps(schema, indent=2, ensure_ascii=False) + "\n"


def _types(setting: Setting) -> list[str]:
    """JSON types of a setting's value in YAML. The service itself checks ranges and formats when it starts."""
    origin = get_origin(setting.annotation) or setting.annotation
    if origin is Literal:
        origin = type(get_args(setting.annotation)[0])
    own = TYPES.get(origin, "string")
    # Sizes may have a unit, and a list with a single element may be written as this element.
    more = ["string"] if setting.type_name == "bytes" else ["integer", "string"] if own == "array" else []
    return [own, *more, "null"]


class Dumper(yaml.SafeDumper):
    """Writes text of several lines, such as a settings file, as literal blocks."""

    def represent_str(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Dumper.add_representer(str, Dumper.represent_str)


def render(values: Mapping[str, Any], name: str = NAME, namespace: str = NAMESPACE) -> str:
    """All objects of a release except hooks, as one YAML stream."""
    with Chart.load(CHART) as chart:
        rendered = chart.render(dict(values), name=name, namespace=namespace)
    texts = [text for file, text in sorted(rendered.items()) if file.endswith(".yaml")]
    objects = [each for text in texts for each in yaml.load_all(text, LOADER) if each]
    kept = [each for each in objects if "helm.sh/hook" not in each["metadata"].get("annotations", {})]
    return "---\n".join(yaml.dump(each, Dumper=Dumper, sort_keys=False, width=120) for each in kept)


def manifests() -> dict[str, str]:
    """Rendered manifests by file name: for the default values, and for each example in values/."""
    found = {"default.yaml": render({})}
    for file in sorted(EXAMPLES.glob("*.yaml")):
        found[file.name] = render(yaml.safe_load(file.read_text()))
    return {name: f"# Rendered from the chart by k8s/render.py.\n{text}" for name, text in found.items()}


def write_all() -> None:
    SCHEMA.write_text(schema_with_settings())
    MANIFESTS.mkdir(exist_ok=True)
    for name, text in manifests().items():
        (MANIFESTS / name).write_text(text)
        print(MANIFESTS / name)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Writes the schema and k8s/manifests, or prints the objects of a release."
    )
    parser.add_argument(
        "values", nargs="?", type=Path, help="YAML file with values: prints the objects of this release"
    )
    parser.add_argument("--name", default=NAME, help="name of the release (default: %(default)s)")
    parser.add_argument("--namespace", default=NAMESPACE, help="namespace of the release (default: %(default)s)")
    given = parser.parse_args()
    if given.values is None:
        write_all()
    else:
        try:
            print(render(yaml.safe_load(given.values.read_text()) or {}, given.name, given.namespace), end="")
        except (OSError, yaml.YAMLError, HelmError) as error:
            parser.exit(1, f"error: {given.values}: {error}\n")


if __name__ == "__main__":
    main()
