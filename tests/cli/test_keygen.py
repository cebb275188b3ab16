"""`sluice keygen`."""

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.ring.keys import ROLES, Keys


def run(*arguments: str):
    return CliRunner().invoke(app, ["keygen", *arguments])


@pytest.fixture
def folder(tmp_path):
    assert run(str(tmp_path / "keys")).exit_code == 0
    return tmp_path / "keys"


def test_every_role_has_its_own_pair(folder):
    assert len({Keys(folder, role).own.public for role in ROLES}) == 3


def test_keys_are_not_overwritten(folder):
    before = Keys(folder, "engine").own
    done = run(str(folder))
    assert done.exit_code == 1
    assert "--rotate" in done.stderr
    assert Keys(folder, "engine").own == before


def test_a_rotated_role_has_a_new_key_and_its_former_key_stays_valid(folder):
    before = {role: Keys(folder, role).own for role in ROLES}
    assert run(str(folder), "--rotate", "detok").exit_code == 0
    keys = Keys(folder, "detok")
    assert keys.public("detok") == (keys.own.public, before["detok"].public)
    assert keys.own != before["detok"]
    assert all(Keys(folder, role).own == before[role] for role in ("router", "engine"))


def test_a_rotation_is_finished_once(folder):
    before = {role: Keys(folder, role).own for role in ROLES}
    assert run(str(folder), "--rotate", "detok").exit_code == 0
    done = run(str(folder), "--retire", "detok")
    assert (done.exit_code, done.stdout) == (0, f"{folder}/public/detok.key\n")
    keys = Keys(folder, "detok")
    assert keys.public("detok") == (keys.own.public,)
    assert all(Keys(folder, role).own == before[role] for role in ("router", "engine"))
    again = run(str(folder), "--retire", "detok")
    assert again.exit_code == 1
    assert "detok.key contains one key" in again.stderr
    assert Keys(folder, "detok").own == keys.own


def test_rotate_and_retire_cannot_be_combined(folder):
    done = run(str(folder), "--retire", "detok", "--rotate", "detok")
    assert done.exit_code == 1
    assert "--rotate and --retire are separate steps" in done.stderr


@pytest.mark.parametrize("option", ["--rotate", "--retire"])
def test_an_unknown_role_is_reported(folder, option):
    done = run(str(folder), option, "gateway")
    assert done.exit_code == 1
    assert f"{option} must be one of router, engine, detok (got gateway)" in done.stderr


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(str(tmp_path / "file"))
    assert done.exit_code == 1
    assert "error: " in done.stderr
