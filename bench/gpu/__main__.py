"""python -m bench.gpu: check and measure the engine on this machine's GPU; see docs/gpu.md."""

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch

from bench.gpu import page, plot
from bench.gpu.budget import Budget
from bench.gpu.findings import Findings, Skip
from bench.gpu.origin import origin
from bench.gpu.peers.child import OFFLINE
from bench.gpu.scale import FULL, tiny_scale
from bench.gpu.session import Session
from bench.gpu.stages import Stages

OUT = Path(__file__).parents[2] / "docs" / "measurements"


def main(arguments: list[str]) -> None:
    """Run, and write what was found. Ends with status 1 where something does not hold or went wrong."""
    options = _options(arguments)
    if options.draw:
        found = Findings.load(options.out / "gpu.json")
        plot.draw(found, options.out / "gpu.png")
        _write(found, options.out)
        return
    os.environ.update(OFFLINE)
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("python -m bench.gpu: torch finds no CUDA device; --device cpu --tiny sees whether it works")
    device = torch.device(options.device)
    options.out.mkdir(parents=True, exist_ok=True)
    found = Findings(origin(arguments, device))
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True) as folder:
        session = Session(found, Budget(options.seconds), device, Path(folder), options.out / "gpu.json")
        session.say(", ".join(f"{name} {value}" for name, value in found.origin.items()))
        session.watch(lambda: _write(found, options.out))
        try:
            Stages(session, tiny_scale() if options.tiny else FULL).run()
            _draw(session, options.out)
        finally:
            _write(found, options.out)
    if not found.passed:
        sys.exit(1)


def _draw(session: Session, folder: Path) -> None:
    try:
        plot.draw(session.findings, folder / "gpu.png")
    except Skip as reason:
        session.skip("plot", str(reason))


def _write(found: Findings, folder: Path) -> None:
    found.save(folder / "gpu.json")
    (folder / "gpu.md").write_text(page.markdown(found), encoding="utf-8")
    print(f"\n{page.text(found)}\n\nwritten to {folder}")


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Checks and measures the GPU engine.")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the tiny model and few steps: see whether it works")
    parser.add_argument("--seconds", type=float, default=480, help="budget; what does not fit is skipped")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for gpu.json, gpu.md and gpu.png")
    parser.add_argument("--draw", action="store_true", help="only write gpu.md and gpu.png, from gpu.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main(sys.argv[1:])
