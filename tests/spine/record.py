"""The recorded ways of a plain request."""

import json
from dataclasses import asdict
from pathlib import Path

from tests.spine.trace import Way

FILE = Path(__file__).with_name("plain_request.json")


def read() -> dict[str, Way]:
    return {name: Way(**fields) for name, fields in json.loads(FILE.read_text()).items()}


def write(ways: dict[str, Way]) -> None:
    FILE.write_text(json.dumps({name: asdict(way) for name, way in ways.items()}, indent=2) + "\n")
