"""`python -m tests.spine`: records what a plain request enters now, which the test compares with later."""

from tests.spine.record import write
from tests.spine.trace import ways

if __name__ == "__main__":
    measured = ways()
    write(measured)
    for name, way in measured.items():
        print(
            f"{name}: {len(way.files)} files, {way.functions} functions, {way.executed_lines} executed lines, "
            f"{way.source_lines} lines of source"
        )
