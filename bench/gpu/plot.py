"""Findings as a picture."""

from pathlib import Path

from bench.gpu.findings import Findings, Skip


def draw(found: Findings, file: Path) -> None:
    """Generation by batch, beside what a copy reaches; who else was asked. Raises Skip where matplotlib is missing."""
    try:
        from bench.gpu.picture import of_findings
    except ImportError as error:
        raise Skip(f"no {error.name}") from error
    if not found.decode:
        raise Skip("nothing was measured")
    of_findings(found).savefig(file)
