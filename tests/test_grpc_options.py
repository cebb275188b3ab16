"""gRPC silently ignores unknown channel options, so every option that we set must occur in its library."""

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
    """Names of options: the first items of pairs that start with "grpc."."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple) and len(node.elts) == 2 and isinstance(node.elts[0], ast.Constant):
            name = node.elts[0].value
            if isinstance(name, str) and name.startswith("grpc."):
                yield name


@pytest.fixture(scope="module")
def library() -> bytes:
    """gRPC's shared library."""
    return Path(cygrpc.__file__).read_bytes()


@pytest.fixture(scope="module")
def options_in_sources() -> dict[str, Path]:
    """Options that our sources set, each with a file that does so."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if file != Path(__file__)]
    texts = {file: file.read_text("utf-8") for file in files}
    return {name: file for file, text in texts.items() if '"grpc.' in text for name in options_of(ast.parse(text))}


def knows(library: bytes, name: str) -> bool:
    """Whether the library contains the name as the end of a C string."""
    return name.encode() + b"\0" in library


def test_the_check_distinguishes_similar_names(library) -> None:
    assert knows(library, "grpc.http2.min_ping_interval_without_data_ms")
    assert not knows(library, "grpc.http2.min_recv_ping_interval_without_data_ms")
    assert not knows(library, "grpc.keepalive_time")


def test_the_library_knows_every_option_that_we_set(library, options_in_sources) -> None:
    used = {name for name, _ in (*_options(RouterSettings(model="m")), *CHANNEL_OPTIONS)}
    assert used <= options_in_sources.keys(), "the search in the sources has missed some"
    unknown = {name: str(file) for name, file in options_in_sources.items() if not knows(library, name)}
    assert unknown == {}
