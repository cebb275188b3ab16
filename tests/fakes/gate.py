"""A logits processor that blocks an engine in the middle of an output until a file exists."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.fakes.processes import wait_until

VARIABLE = "TEST_GATE"
"""The environment variable with the path of the file."""
TOKENS = 8
"""Tokens of prompt and output up to which the gate does not block."""


def gate(_: str, __: Any, token_ids: Sequence[Sequence[int]], *___: Any) -> None:
    if len(token_ids[0]) > TOKENS:
        if not wait_until(Path(os.environ[VARIABLE]).exists):
            raise TimeoutError("the gate was not opened")
