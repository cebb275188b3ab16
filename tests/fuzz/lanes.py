"""Send mutated frames to the inboxes of the three services: `python -m tests.fuzz.lanes --frames 1000000 --seed 1`.

Each service is the real one and serves well-formed streams meanwhile. No exception may be raised, the streams must be
right, and memory must not grow.
"""

import argparse
import gc
import logging
import time
from collections.abc import Callable

import structlog
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tests.fuzz import detokenizer, engine, router
from tests.fuzz.sender import resident_mib

TARGETS: dict[str, Callable[[int, int, Callable[[int], None]], str]] = {
    "engine": engine.run,
    "detok": detokenizer.run,
    "router": router.run,
}
WARM = 0.3
"""Fraction of a run after which memory is measured for the first time."""


class Watch:
    """Measures memory growth and duration of a run."""

    def __init__(self, frames: int) -> None:
        self.before = 0.0
        self._warm = int(frames * WARM)
        self._started = time.monotonic()

    def tick(self, sent: int) -> None:
        """Called regularly with the number of frames sent so far."""
        if sent >= self._warm and not self.before:
            gc.collect()
            self.before = resident_mib()

    def grown(self) -> float:
        """Growth of memory since the warm-up, in MiB."""
        gc.collect()
        return resident_mib() - self.before

    def seconds(self) -> float:
        return time.monotonic() - self._started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="per service")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=list(TARGETS))
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    for name in arguments.targets:
        watch = Watch(arguments.frames)
        with Progress(*columns) as progress:
            task = progress.add_task(name, total=arguments.frames)

            def tick(sent: int, watch: Watch = watch, progress: Progress = progress, task=task) -> None:
                watch.tick(sent)
                progress.update(task, completed=sent)

            summary = TARGETS[name](arguments.frames, arguments.seed, tick)
        seconds = watch.seconds()
        print(
            f"{name}: {arguments.frames} frames in {seconds:.0f} s ({arguments.frames / seconds:.0f}/s), no exception; "
            f"{summary}; memory {watch.before:.0f} MiB, {watch.grown():+.1f} MiB since"
        )


if __name__ == "__main__":
    main()
