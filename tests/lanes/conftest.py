"""A folder with keys of every role."""

import pytest

from sluice.lanes.keys import ROLES, generate


@pytest.fixture
def folder(tmp_path):
    for role in ROLES:
        generate(tmp_path / "keys", role)
    return tmp_path / "keys"
