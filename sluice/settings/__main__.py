"""`python -m sluice.settings` prints docs/settings.md."""

from collections.abc import Iterable, Sequence

from sluice.settings.describe import Setting, sections_of
from sluice.settings.services import PROCESSES

INTRODUCTION = """# Settings

All settings of the services. This page is generated from `sluice/settings` by `make settings`.

A service looks for the value of a setting in four places and uses the first that it finds:

1. a flag: `python -m router --max-live 100`
2. an environment variable: `SLUICE_ROUTER_MAX_LIVE=100`. The prefixes of the other services are `SLUICE_ENGINE_`,
   `SLUICE_DETOK_`, `SLUICE_GATEWAY_` and `SLUICE_KEEPER_`.
3. the YAML file that `--config FILE` names: `max_live: 100`
4. the default

An unknown name is an error. Separate the elements of a list with commas, or write a YAML list. Sizes in bytes may have
a unit, such as `8GiB`.

`sluice serve` has options for the most common settings (`sluice serve --help`) and `--set SERVICE.NAME=VALUE` for the
others, such as `--set engine.max_tokens_per_step=1024`. SERVICE is `router`, `engine`, `detokenizer`, `gateway` or
`keeper`. Without SERVICE, the value applies to every service that has the setting: `--set lora=true` to engines, `--set
priority_aging_seconds=5` to routers and engines. `sluice serve` itself chooses the settings that connect the services
to each other, such as `id`, `listen` and `engines`."""


HEAD = "| setting | type | default | description |\n| --- | --- | --- | --- |"


def page() -> str:
    """The page, in Markdown. Sections that several services share come first, under the names of those services."""
    services_by_title: dict[str, list[str]] = {}
    tables: dict[str, str] = {}
    for service, cls in PROCESSES.items():
        for title, settings in sections_of(cls).items():
            services_by_title.setdefault(title, []).append(service)
            tables[title] = _table(settings)
    parts = [INTRODUCTION]
    for services in sorted(map(tuple, services_by_title.values()), key=len, reverse=True):
        heading = f"## {_joined(services).capitalize() if len(services) < len(PROCESSES) else 'All services'}"
        if heading in parts:
            continue
        parts.append(heading)
        for title, owners in services_by_title.items():
            if tuple(owners) == services:
                parts += [f"### {title}", tables[title]]
    return "\n\n".join(parts) + "\n"


def _joined(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} and {last}" if others else last


def _table(settings: Iterable[Setting]) -> str:
    return "\n".join([HEAD, *(_row(setting) for setting in settings if not setting.launcher_only)])


def _row(setting: Setting) -> str:
    type_and_range = ", ".join(filter(None, [setting.type_name, setting.range])).replace("|", "\\|")
    default = setting.default if setting.default in ("required", "unset", "empty") else f"`{setting.default}`"
    return f"| `{setting.name}` | {type_and_range} | {default} | {setting.description} |"


if __name__ == "__main__":
    print(page(), end="")
