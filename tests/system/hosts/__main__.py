"""Streams over a ring of many machines to which things happen: python -m tests.system.hosts

Each service is alone in a network namespace; needs root, ip and dnsmasq. Prints a table of the scenarios and writes it
to docs/measurements/hosts.md; exit status 1 when a stream failed, differs, or paused for more than 10 s.
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
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.system.hosts", description=__doc__)
    parser.add_argument("--only", default="", help="run scenarios whose row contains this text, and write no page")
    parser.add_argument("--logs", type=Path, help="folder for the services' logs")
    given = parser.parse_args()
    if reason := missing():
        parser.error(reason)
    console = Console()
    with tempfile.TemporaryDirectory() as folder:
        logs = given.logs or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        outcomes = list(run_all(given.only, logs, console))
    if not given.only:
        write_page(outcomes, sys.argv[1:])
    raise SystemExit(0 if outcomes and all(outcome.good for outcome in outcomes) else 1)


def run_all(only: str, folder: Path, console: Console) -> Iterator[Outcome]:
    """Prints each outcome as it is known."""
    for title, (naming, ipv6, scenarios) in RINGS.items():
        left = {f"{title}: {name}": scenario for name, scenario in scenarios.items() if only in f"{title}: {name}"}
        while left:
            # A scenario that broke its ring costs the next one a new ring, and no more.
            for outcome in run_ring(naming, ipv6, dict(left), Path(tempfile.mkdtemp(dir=folder))):
                del left[outcome.name]
                console.print(outcome.text, highlight=False, soft_wrap=True, markup=False)
                yield outcome


def run_ring(naming: Naming, ipv6: bool, scenarios: Mapping[str, Scenario], folder: Path) -> Iterator[Outcome]:
    """Up to the first scenario that does not leave the ring whole."""
    with Network(folder, ipv6=ipv6) as network, Ring(network, folder, naming) as ring:
        truths = run_undisturbed(ring)
        for name, scenario in scenarios.items():
            outcome = run_disturbed(ring, name, scenario, truths)
            yield outcome
            if outcome.broken:
                return


if __name__ == "__main__":
    main()
