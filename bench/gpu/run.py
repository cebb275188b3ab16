"""A complete run: from command line options to result files."""

import argparse
import os
import tempfile
from pathlib import Path

import torch

from bench.gpu import page
from bench.gpu.findings import Findings, Skip
from bench.gpu.machine import origin
from bench.gpu.measures import AS_SERVED
from bench.gpu.plan import Plan
from bench.gpu.scale import FULL, tiny_scale
from bench.gpu.session import Budget, GpuSession

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
"""Environment variables of this process and its children; libraries read them when they are imported."""


def draw(folder: Path) -> None:
    """Write gpu.md and gpu.png from gpu.json."""
    found = Findings.load(folder / "gpu.json")
    _draw(found, folder)
    (folder / "gpu.md").write_text(page.markdown(found), encoding="utf-8")


def run(options: argparse.Namespace, arguments: list[str]) -> bool:
    """Returns whether everything passed. Findings are written after each task."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("python -m bench.gpu: torch finds no CUDA device; to try it on a CPU: --device cpu --tiny")
    os.environ.update(OFFLINE if options.device == "cuda" else OFFLINE | {"CUDA_VISIBLE_DEVICES": ""})
    device = torch.device(options.device)
    found = Findings(origin(arguments, device))
    with tempfile.TemporaryDirectory(prefix="bench-gpu-", ignore_cleanup_errors=True) as folder:
        session = GpuSession(found, Budget(options.seconds), device, Path(folder), options.out / "gpu.json")
        session.end_on_signals()
        session.say(", ".join(f"{name} {value}" for name, value in found.origin.items()))
        session.watch(lambda: _end(session, options.out))
        scale = tiny_scale() if options.tiny else FULL
        try:
            plan = Plan(session, scale, new=options.what == "first")
            {"files": plan.files, "quantized": plan.quantized}.get(options.what, plan.run)()
            try:
                _draw(found, options.out)
            except Skip as reason:
                session.skip("plot", str(reason))
        finally:
            _end(session, options.out)
    return found.passed


def _draw(found: Findings, folder: Path) -> None:
    try:
        from bench.gpu import picture
    except ImportError as error:
        raise Skip(f"no {error.name}") from error
    if all(one.mode != AS_SERVED for one in found.decode):
        raise Skip("no measurements of generation")
    picture.draw(found).savefig(folder / "gpu.png")


def _end(session: GpuSession, folder: Path) -> None:
    session.keep()
    print(f"\n{page.markdown(session.findings)}\n\nwritten to {folder}")
