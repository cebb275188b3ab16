"""Results of tests of this machine, remembered for an engine's next start, which streams wait for."""

import os
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import msgspec

T = TypeVar("T")
SUFFIX = ".tested"


def remembered(folder: Path | None, question: object, kind: type[T], ask: Callable[[], T]) -> T:
    """What `ask` returns, or has returned to an engine before. `question`: all that the answer depends on; its repr
    must be the same whenever it is asked. `kind`: of the answer. `folder`: in this machine's memory; None: nothing is
    remembered. Raises as `ask`."""
    if folder is None:
        return ask()
    path = folder / f"{blake2b(repr(question).encode(), digest_size=8).hexdigest()}{SUFFIX}"
    with suppress(OSError, msgspec.MsgspecError):  # Not there, or not whole: it is asked again.
        return msgspec.json.decode(path.read_bytes(), type=kind)
    answer = ask()
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_bytes(msgspec.json.encode(answer))
        new.rename(path)
    except OSError:  # The folder is full. What is not remembered is asked again.
        new.unlink(missing_ok=True)
    return answer
