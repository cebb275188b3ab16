"""`sluice keygen`."""

import pytest
from typer.testing import CliRunner

from sluice.cli.commands import app
from sluice.lanes.keys import ROLES, Keys


def run(*arguments: str):
    return CliRunner().invoke(app, ["keygen", *arguments])


@pytest.fixture
def folder(tmp_path):
    assert run(str(tmp_path / "keys")).exit_code == 0
    return tmp_path / "keys"


def test_every_role_has_its_own_pair(folder):
    assert len({Keys(folder, role).own.public for role in ROLES}) == 3


def test_keys_are_not_overwritten(folder):
    key_before = Keys(folder, "engine").own
    result = run(str(folder))
    assert result.exit_code == 1
    assert "--rotate" in result.stderr
    assert Keys(folder, "engine").own == key_before


def test_a_rotated_role_has_a_new_key_and_its_former_key_stays_valid(folder):
    former = {role: Keys(folder, role).own for role in ROLES}
    assert run(str(folder), "--rotate", "detok").exit_code == 0
    keys = Keys(folder, "detok")
    assert keys.public("detok") == (keys.own.public, former["detok"].public)
    assert keys.own != former["detok"]
    assert all(Keys(folder, role).own == former[role] for role in ("router", "engine"))


def test_a_rotation_is_finished_once(folder):
    former = {role: Keys(folder, role).own for role in ROLES}
    assert run(str(folder), "--rotate", "detok").exit_code == 0
    result = run(str(folder), "--retire", "detok")
    assert (result.exit_code, result.stdout) == (0, f"{folder}/public/detok.key\n")
    keys = Keys(folder, "detok")
    assert keys.public("detok") == (keys.own.public,)
    assert all(Keys(folder, role).own == former[role] for role in ("router", "engine"))
    second_result = run(str(folder), "--retire", "detok")
    assert second_result.exit_code == 1
    assert "detok.key contains one key" in second_result.stderr
    assert Keys(folder, "detok").own == keys.own


def test_rotate_and_retire_cannot_be_combined(folder):
    result = run(str(folder), "--retire", "detok", "--rotate", "detok")
    assert result.exit_code == 1
    assert "--rotate and --retire are separate steps" in result.stderr


@pytest.mark.parametrize("option", ["--rotate", "--retire"])
def test_an_unknown_role_is_reported(folder, option):
    result = run(str(folder), option, "gateway")
    assert result.exit_code == 1
    assert f"{option} must be one of router, engine, detok (got gateway)" in result.stderr


def test_a_folder_that_cannot_be_written_is_reported(tmp_path):
    (tmp_path / "file").write_text("")
    result = run(str(tmp_path / "file"))
    assert result.exit_code == 1
    assert "error: " in result.stderr
