"""gRPC ignores an option that it does not know without a word: every name given to it has to be one of its library."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from grpc._cython import cygrpc

from router.api.listener import _options
from sluice.client.connection import CHANNEL_OPTIONS
from sluice.settings.services import RouterSettings

ROOT = Path(__file__).parents[1]
PACKAGES = ("bench", "examples", "router", "sluice", "tests")


def options_of(tree: ast.AST) -> Iterator[str]:
    """First parts of pairs that begin as names of gRPC's options do."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant):
            name = node.elts[0].value
            if isinstance(name, str) and name.startswith("grpc."):
                yield name


@pytest.fixture(scope="module")
def known() -> bytes:
    return Path(cygrpc.__file__).read_bytes()


@pytest.fixture(scope="module")
def given() -> dict[str, Path]:
    """Options in the project's sources, each with a file that has it."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file != Path(__file__)]
    texts = {file: file.read_text("utf-8") for file in files}
    return {name: file for file, text in texts.items() if '"grpc.' in text for name in options_of(ast.parse(text))}


def knows(library: bytes, name: str) -> bool:
    """A C string of its own; what is before it need not end in a zero."""
    return name.encode() + b"\0" in library


def test_the_check_tells_names_apart(known) -> None:
    assert knows(known, "grpc.http2.min_ping_interval_without_data_ms")
    assert not knows(known, "grpc.http2.min_recv_ping_interval_without_data_ms")
    assert not knows(known, "grpc.keepalive_time")


def test_every_option_is_one_that_the_library_knows(known, given) -> None:
    built = {name for name, _ in (*_options(RouterSettings(model="m")), *CHANNEL_OPTIONS)}
    assert built <= given.keys(), "the search has missed some"
    assert {name: str(file) for name, file in given.items() if not knows(known, name)} == {}
