"""`sluice convert`: makes a checkpoint folder from a GGUF file."""

from pathlib import Path
from typing import Annotated

import typer

from sluice.checkpoint.errors import CheckpointError
from sluice.cli.common import fail
from sluice.gguf.folder import convert as convert_file


def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE.gguf", help="The model.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A folder to create.", show_default=False)],
    link: Annotated[
        bool, typer.Option("--link", help="Put a link to the file into the folder instead of a copy.")
    ] = False,
) -> None:
    """Write a checkpoint folder for a GGUF file, for images, volumes and other machines.

    The weights stay as they are in the file; configuration, tokenizer and chat template become files of their own.
    `sluice serve FILE.gguf` does the same by itself, in the user's cache.
    """
    if not file.is_file():
        raise fail(f"there is no file {file}")
    try:
        convert_file(file, folder, link=link)
    except FileExistsError as error:
        raise fail(f"{folder} exists already") from error
    except (CheckpointError, OSError) as error:
        raise fail(str(error)) from error
    print(f"{folder} is ready: sluice serve {folder}")
