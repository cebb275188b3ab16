"""A logits processor that stops an engine in the middle of an output, until a file exists."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.processes import wait_until

VARIABLE = "TEST_GATE"
"""Of the environment: the file."""
TOKENS = 8
"""Of prompt and output that pass in any case."""


def gate(_: str, __: Any, token_ids: Sequence[Sequence[int]], *___: Any) -> None:
    if len(token_ids[0]) > TOKENS:
        wait_until(Path(os.environ[VARIABLE]).exists)
