"""Disturbs a ring of many machines while streams run: python -m tests.system.hosts

Each service runs in a separate network namespace, which needs root, ip and dnsmasq. Prints the outcome of each scenario
and writes a table to docs/measurements/hosts.md. Exit status 1: a stream failed, differed or paused for more than 10 s.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from rich.console import Console

from tests.system.hosts.network import Network, missing
from tests.system.hosts.page import write_page
from tests.system.hosts.ring import Naming, Ring
from tests.system.hosts.scenarios import BY_DNS, BY_IPV6, BY_TCP, Scenario
from tests.system.hosts.streams import Outcome, run_disturbed, run_undisturbed

RINGS: Mapping[str, tuple[Naming, bool, Mapping[str, Scenario]]] = {
    "tcp://name": ("tcp", False, BY_TCP),
    "dns://": ("dns", False, BY_DNS),
    "dns://, IPv6 only": ("dns", True, BY_IPV6),
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.system.hosts", description=__doc__)
    parser.add_argument("--only", default="", help="run scenarios whose row contains this text, and write no page")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs")
    arguments = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        logs = arguments.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        outcomes = list(run_all(arguments.only, logs, console))
    if not arguments.only:
        write_page(outcomes, sys.argv[1:])
    raise SystemExit(0 if outcomes and all(outcome.good for outcome in outcomes) else 1)


def run_all(only: str, folder: Path, console: Console) -> Iterator[Outcome]:
    """Run the scenarios whose row contains `only`, and print each outcome."""
    for title, (naming, ipv6, scenarios) in RINGS.items():
        remaining = {f"{title}: {name}": scenario for name, scenario in scenarios.items() if only in f"{title}: {name}"}
        while remaining:
            # After a scenario that broke its ring, the remaining ones run on a new ring.
            for outcome in run_ring(naming, ipv6, dict(remaining), Path(tempfile.mkdtemp(dir=folder))):
                del remaining[outcome.name]
                console.print(outcome.text, highlight=False, soft_wrap=True, markup=False)
                yield outcome


def run_ring(naming: Naming, ipv6: bool, scenarios: Mapping[str, Scenario], folder: Path) -> Iterator[Outcome]:
    """Run scenarios on one ring, up to the first one that breaks it."""
    with Network(folder, ipv6=ipv6) as network, Ring(network, folder, naming) as ring:
        expected = run_undisturbed(ring)
        for name, scenario in scenarios.items():
            outcome = run_disturbed(ring, name, scenario, expected)
            yield outcome
            if outcome.broken:
                return


if __name__ == "__main__":
    main()
