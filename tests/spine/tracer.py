"""`python tracer.py -m router …`: a service that records which lines of its functions run, phase by phase.

The test names a phase by writing its name to the file `phase` in the folder $SPINE_FOLDER. When it writes another name,
each service writes the lines of the phase before to `<phase>.<process>.json`.
"""

import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = tuple(
    f"{ROOT / folder}{os.sep}" for folder in ("router", "engine_worker", "detok_service", "gateway", "sluice")
)
KV_CACHE = f"{ROOT / 'engine_worker' / 'kvcache'}{os.sep}"
CHECK = "KvCacheManager.check"
EVERY_SECOND = "Orphans."
"""A class that looks at each live request once per second, and so at one that a busy machine computes for longer."""
FOLDER = "SPINE_FOLDER"
PHASE = "phase"
POLL_SECONDS = 0.02


def _checks_books(frame: FrameType | None) -> bool:
    """Whether the engine checks the books of its KV cache, which it does once it is idle after requests."""
    while frame is not None and frame.f_code.co_filename.startswith(KV_CACHE):
        if frame.f_code.co_qualname == CHECK:
            return True
        frame = frame.f_back
    return False


class Recorder:
    """Lines by function, while a phase has a name. Every thread of the process calls it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._phase = ""
        self._lines: dict[CodeType, set[int]] = {}
        self._is_product: dict[str, bool] = {}

    def trace(self, frame: FrameType, event: str, _: Any) -> Any:
        """The trace function of `sys.settrace`: called when a function is entered or a coroutine goes on."""
        if not self._phase or not self._counts(frame.f_code) or _checks_books(frame):
            return None
        lines = self._lines.setdefault(frame.f_code, set())

        def line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            return line

        return line

    def _counts(self, code: CodeType) -> bool:
        if code.co_name == "<module>" or code.co_qualname.startswith(EVERY_SECOND):
            return False
        file = code.co_filename
        if file not in self._is_product:
            self._is_product[file] = file.startswith(PRODUCT)
        return self._is_product[file]

    def watch(self) -> None:
        """Follow the phases that the test names, until the process ends."""
        file = self._folder / PHASE
        while True:
            time.sleep(POLL_SECONDS)
            phase = file.read_text() if file.exists() else ""
            if phase != self._phase:
                ended, lines = self._phase, self._lines
                self._lines, self._phase = {}, phase
                if ended:
                    self._write(ended, lines)

    def _write(self, phase: str, lines: dict[CodeType, set[int]]) -> None:
        functions = [
            {
                "file": str(Path(code.co_filename).relative_to(ROOT)),
                "name": code.co_qualname,
                "first_line": code.co_firstlineno,
                "size": max(line for _, _, line in code.co_lines() if line) - code.co_firstlineno + 1,
                "lines": sorted(numbers),
            }
            for code, numbers in list(lines.items())
        ]
        file = self._folder / f"{phase}.{os.getpid()}"
        file.write_text(json.dumps(functions))
        file.rename(file.with_name(f"{file.name}.json"))


def main() -> None:
    recorder = Recorder(Path(os.environ[FOLDER]))
    threading.Thread(target=recorder.watch, daemon=True).start()
    threading.settrace(recorder.trace)
    sys.settrace(recorder.trace)
    _, _, module, *flags = sys.argv
    sys.argv = [module, *flags]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
