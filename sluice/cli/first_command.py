"""The command that the ready line of `sluice serve` suggests."""

import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from sluice.cli.serve_options import DEFAULT_PORT
from sluice.settings.services import RouterSettings

CODE = "def fibonacci(n):"
"""A prompt for the bundled model, which completes Python."""
TEXT = "Once upon a time"
PRINT_FIRST = "NF && $1 !~ /^(#|sha256:)/ {print $1; exit}"
"""Program of awk that prints the first token of a tokens file that is not a hash."""


def first_command(address: str, router: RouterSettings, *, chats: bool, bundled: bool) -> str:
    """A command line for the server at `address`, to be copied: it connects as the router's settings require.

    `chats`: whether the model has a chat template. `bundled`: whether it is the bundled model.
    """
    command = ["chat"] if chats and not bundled else ["generate"]
    if int(address.rpartition(":")[2]) != DEFAULT_PORT:
        command += ["--address", address]
    if router.tls_certificate is not None:
        # The client trusts exactly this certificate, whoever issued it.
        command += ["--tls-ca", str(Path(router.tls_certificate).absolute())]
    if router.tls_client_ca is not None:
        command += ["--tls-cert", "CLIENT.pem", "--tls-key", "CLIENT.key"]
    prompt = [] if command[0] == "chat" else [f'"{CODE if bundled else TEXT}"']
    return " ".join([*_token(router), _program(), *map(shlex.quote, command), *prompt])


def _token(router: RouterSettings) -> Iterator[str]:
    """The assignment of SLUICE_TOKEN, if callers need a token. The token itself is not shown, for logs keep output."""
    if router.tokens_file is not None and _has_readable_token(file := Path(router.tokens_file).absolute()):
        yield f"SLUICE_TOKEN=$(awk '{PRINT_FIRST}' {shlex.quote(str(file))})"
    elif router.authenticates:
        yield "SLUICE_TOKEN=TOKEN"


def _has_readable_token(file: Path) -> bool:
    """Whether the file has a token that is not a hash."""
    if not file.exists():
        # The router runs on another machine.
        return False
    words = (line.split("#", 1)[0].split() for line in file.read_text("utf-8").splitlines())
    return any(first and not first[0].startswith("sha256:") for first in words)


def _program() -> str:
    """The command line that runs `sluice` in another terminal."""
    if shutil.which("sluice"):
        return "sluice"
    script = Path(sys.argv[0])
    return f"{sys.executable} -m sluice" if script.name == "__main__.py" else str(script)
