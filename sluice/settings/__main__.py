"""`python -m sluice.settings`: prints docs/settings.md."""

from collections.abc import Iterable, Sequence

from sluice.settings.describe import Setting, sections_of
from sluice.settings.services import SERVICES

INTRODUCTION = """# Settings

All settings of the services. This page is generated from `sluice/settings` by `make settings`.

A service reads each of its settings from a flag (`python -m router --max-live 100`), an environment variable
(`SLUICE_ROUTER_MAX_LIVE=100`; `SLUICE_ENGINE_…`, `SLUICE_DETOK_…` and `SLUICE_GATEWAY_…` for the others), its YAML
file (`--config FILE`, with `max_live: 100`) or its default, in that order. Unknown names are refused. A list is written
with commas, or as a list in YAML.

`sluice serve` has options for the most common settings (`sluice serve -h`) and `--set SERVICE.NAME=VALUE` for all
others, such as `--set engine.max_tokens_per_step=1024`. SERVICE is `router`, `engine`, `detokenizer` or
`gateway`; without it the value is for every service that has the setting: `--set priority_aging_seconds=5`. `sluice
serve` itself chooses what places a service in the ring (`id`, `listen`, `engines`, …)."""


HEAD = "| setting | type | default | |\n| --- | --- | --- | --- |"


def page() -> str:
    """Markdown: sections that several services have come first, under the names of these services."""
    having: dict[str, list[str]] = {}
    tables: dict[str, str] = {}
    for service, cls in SERVICES.items():
        for title, settings in sections_of(cls).items():
            having.setdefault(title, []).append(service)
            tables[title] = _table(settings)
    parts = [INTRODUCTION]
    for services in sorted(map(tuple, having.values()), key=len, reverse=True):
        heading = f"## {_joined(services).capitalize() if len(services) < len(SERVICES) else 'All services'}"
        if heading in parts:
            continue
        parts.append(heading)
        for title, owners in having.items():
            if tuple(owners) == services:
                parts += [f"### {title}", tables[title]]
    return "\n\n".join(parts) + "\n"


def _joined(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _table(settings: Iterable[Setting]) -> str:
    return "\n".join([HEAD, *(_row(each) for each in settings if not each.launcher_only)])


def _row(setting: Setting) -> str:
    kind = ", ".join(filter(None, [setting.type_name, setting.range])).replace("|", "\\|")
    default = setting.default if setting.default in ("required", "unset", "none") else f"`{setting.default}`"
    return f"| `{setting.name}` | {kind} | {default} | {setting.description} |"


if __name__ == "__main__":
    print(page(), end="")
