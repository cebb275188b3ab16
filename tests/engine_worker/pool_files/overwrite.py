"""An engine that overwrites its blocks without pause: `python -m tests.engine_worker.pool_files.overwrite FOLDER`."""

import sys
from itertools import count
from pathlib import Path

from tests.engine_worker.pool_files.files import open_file, store

if __name__ == "__main__":
    _, file = open_file(Path(sys.argv[1]), "writer")
    for step in count():
        block = step % 3
        file.clear(block)
        store(file, block, step % 8)
        if step == 100:
            print("overwriting", flush=True)
