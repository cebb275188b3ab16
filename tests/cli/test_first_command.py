"""The command that the ready line suggests."""

import shutil
import subprocess

import pytest

from sluice.cli.serve import first_command
from sluice.settings.services import RouterSettings


@pytest.fixture(autouse=True)
def _program(monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda _: "/bin/sluice")


def command(address="127.0.0.1:50051", chats=False, bundled=False, **settings) -> str:
    return first_command(address, RouterSettings(model="m", **settings), chats=chats, bundled=bundled)


def test_it_fits_the_model() -> None:
    assert command(chats=True) == "sluice chat"
    assert command() == 'sluice generate "Once upon a time"'
    assert command(chats=True, bundled=True, address="h:1") == 'sluice generate --address h:1 "def fibonacci(n):"'


def test_tls() -> None:
    tls = {"tls_certificate": "/a b/c.pem", "tls_key": "k"}
    assert command(chats=True, **tls) == "sluice chat --tls-ca '/a b/c.pem'"
    mutual = command(chats=True, **tls, tls_client_ca="ca")
    assert mutual.endswith("--tls-cert CLIENT.pem --tls-key CLIENT.key")


def test_the_first_token_of_the_file_is_used_and_not_shown(tmp_path) -> None:
    file = tmp_path / "the tokens"
    file.write_text(f"# tokens\n\nsha256:{'0' * 64} a\nsecret-of-the-team-b b admin  # b\nother-secret-of-c c\n")
    shown = command(chats=True, tokens_file=str(file))
    assert "secret" not in shown
    assert shown.endswith(") sluice chat")
    run = shown.replace("sluice chat", "printenv SLUICE_TOKEN")
    assert subprocess.run(["sh", "-c", run], capture_output=True, text=True, check=True).stdout == (
        "secret-of-the-team-b\n"
    )


@pytest.mark.parametrize("settings", [{"auth": "module:function"}, {"tokens_file": "HASHED"}, {"tokens_file": "/gone"}])
def test_a_token_that_is_not_known_here_is_a_placeholder(tmp_path, settings) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"sha256:{'0' * 64} a\n")
    settings = {name: str(file) if value == "HASHED" else value for name, value in settings.items()}
    assert command(chats=True, **settings) == "SLUICE_TOKEN=TOKEN sluice chat"
