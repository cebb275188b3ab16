"""`sluice protos`: exports the .proto files, for clients in other languages."""

from pathlib import Path
from typing import Annotated

import typer
from google.rpc import status_pb2

import sluice
from sluice.cli.common import fail

OURS = "sluice/v1"
BUF = "buf.yaml"
# Clients need them to read error details.
GOOGLE = ("google/rpc/status.proto", "google/rpc/error_details.proto")

protos = typer.Typer(no_args_is_help=True)


# Without a callback, typer would turn `sluice protos` itself into the only command.
@protos.callback()
def group() -> None:
    """Export the .proto files of the public API."""


@protos.command()
def export(
    folder: Annotated[
        Path,
        typer.Argument(metavar="DIR", help="Folder to write to. Created if missing; existing files are overwritten."),
    ],
) -> None:
    """Write the .proto files to a folder.

    Includes the .proto files of google.rpc that describe error details, and a buf.yaml for buf.
    """
    try:
        for path, content in contract().items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            print(target)
    except OSError as error:
        raise fail(f"cannot write the .proto files: {error}") from error


def contract() -> dict[str, bytes]:
    """File contents by import path."""
    root = _root()
    files = {f"{OURS}/{file.name}": file.read_bytes() for file in sorted((root / OURS).glob("*.proto"))}
    files[BUF] = (root / BUF).read_bytes()
    google = Path(status_pb2.__file__).parents[2]
    return files | {path: (google / path).read_bytes() for path in GOOGLE}


def _root() -> Path:
    """The folder protos/, which is in the installed package, or next to the package in a checkout."""
    package = Path(sluice.__file__).parent
    for root in (package / "protos", package.parent / "protos"):
        if (root / OURS).is_dir():
            return root
    raise FileNotFoundError("this installation has no .proto files")
