"""python -m bench.gpu [first]: check and measure the engine on this machine's GPU; see docs/gpu.md."""

import argparse
import sys
from pathlib import Path

from bench.gpu.files import write_whole

OUT = Path(__file__).parents[2] / "docs" / "measurements"
SECONDS = {"all": 480.0, "first": 600.0}


def main(arguments: list[str]) -> None:
    """Run, and write what was found. Ends with status 1 where something does not hold or went wrong."""
    options = _options(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.draw:
        write_whole(options.out / "gpu.md", "# The GPU engine, measured\n\nBegun; nothing is known yet.\n")
    # Torch takes seconds to import; whatever happens meanwhile, there is a page.
    from bench.gpu.run import draw, run

    if options.draw:
        draw(options.out)
    elif not run(options, arguments):
        sys.exit(1)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Checks and measures the GPU engine.")
    parser.add_argument(
        "what",
        nargs="?",
        choices=["all", "first"],
        default="all",
        help="first: what to know of a new machine, in that order",
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="the tiny model and few steps: see whether it works")
    parser.add_argument("--seconds", type=float, help="budget, 480 or for `first` 600; what does not fit is skipped")
    parser.add_argument("--out", type=Path, default=OUT, help="folder for gpu.json, gpu.md and gpu.png")
    parser.add_argument("--draw", action="store_true", help="only write gpu.md and gpu.png, from gpu.json")
    options = parser.parse_args(arguments)
    options.seconds = options.seconds or SECONDS[options.what]
    return options


if __name__ == "__main__":
    main(sys.argv[1:])
