"""Fixtures of the tests of authentication."""

import pytest

from tests.router.access.tokens import ALICE, BOB, ROOT, sha256


@pytest.fixture
def tokens(tmp_path):
    """A tokens file with two users, one of them by hash, and an admin."""
    file = tmp_path / "tokens"
    file.write_text(f"# who\n{ALICE} alice\n\n{sha256(BOB)} bob # the other\n{ROOT} root admin\n")
    return file
