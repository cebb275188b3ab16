"""python -m bench.gpu [first | files | quantized]: check and measure the engine on this machine's GPU.

See docs/gpu.md."""

import argparse
import sys
from pathlib import Path

from bench.gpu.findings import write_whole

OUT = Path(__file__).parents[2] / "docs" / "measurements"
SECONDS = {"all": 480.0, "first": 600.0, "files": 240.0, "quantized": 540.0}


def main(arguments: list[str]) -> None:
    """Exit status 1 if a check or a task failed."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.draw:
        write_whole(options.out / "gpu.md", "# The GPU engine, measured\n\nStarted; no results yet.\n")
    # Torch takes seconds to import, and a page must exist even if the run is killed meanwhile.
    from bench.gpu.run import draw, run

    if options.draw:
        draw(options.out)
    elif not run(options, arguments):
        sys.exit(1)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Checks and measures the GPU engine.")
    what = (
        "first: for a new machine; also tries each kernel, and runs the most important tasks first. files, "
        "quantized: only what is about KV blocks in files, or quantized matrices"
    )
    parser.add_argument("what", nargs="?", choices=SECONDS, default="all", help=what)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="use the tiny model and few steps, to try this program")
    others = ", ".join(f"for `{name}` {seconds:.0f}" for name, seconds in SECONDS.items() if name != "all")
    seconds = f"time budget (default: {SECONDS['all']:.0f}, {others}); tasks that do not fit are skipped"
    parser.add_argument("--seconds", type=float, help=seconds)
    parser.add_argument("--out", type=Path, default=OUT, help="folder for gpu.json, gpu.md and gpu.png")
    parser.add_argument("--draw", action="store_true", help="measure nothing; write gpu.md and gpu.png from gpu.json")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or SECONDS[options.what]
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
