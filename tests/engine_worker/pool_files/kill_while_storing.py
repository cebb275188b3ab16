"""Engines that store blocks without pause, are killed, and adopt what their predecessor has left, in one folder:
`python -m tests.engine_worker.pool_files.kill_while_storing FOLDER KILLS`. Prints the number of adopted blocks.
"""

import os
import signal
import sys
import time
from itertools import count
from pathlib import Path
from random import Random

from tests.engine_worker.pool_files.files import NUM_BLOCKS, holds, open_file, store

LONGEST_LIFE = 0.03


def live(folder: Path, start: int, progress: int) -> None:
    """Store blocks until this process is killed. `start`: number of the first content. `progress`: a byte is written to
    this descriptor once the engine has started, and another one once it has stored a block."""
    _, file = open_file(folder, "a")
    list(file.adopted())
    os.write(progress, b"x")
    for number in count(start):
        file.clear(number % NUM_BLOCKS)
        store(file, number % NUM_BLOCKS, number)
        if number == start:
            os.write(progress, b"x")


def check(folder: Path) -> int:
    """Adopt the file, and return the number of its blocks. Raises ValueError if one of them is not whole."""
    _, file = open_file(folder, "a")
    adopted = list(file.adopted())
    wrong = [block for block, content in adopted if not holds(file, block, int.from_bytes(content.hash, "little"))]
    file.close()
    # A block that was being stored has no entry yet.
    if wrong or file.damaged:
        raise ValueError(f"blocks {wrong} have other content, and {file.damaged} are damaged")
    return len(adopted)


def main(folder: Path, kills: int) -> None:
    random, adopted = Random(1), 0
    for attempt in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            live(folder, 1000 * attempt, writer)
        # Killed while it starts or later, while it stores its first block or later, or after that.
        for _ in range(attempt % 3):
            os.read(reader, 1)
        os.close(reader)
        os.close(writer)
        time.sleep(random.uniform(0.0, LONGEST_LIFE))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        adopted += check(folder)
    print(adopted)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
