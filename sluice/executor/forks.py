"""Forks of the process that created an executor. Neither gRPC nor the executor's threads work in them."""

import os
import weakref
from pathlib import Path
from shutil import rmtree

FORKED = (
    "an executor cannot be used or created in a fork of a process that has created one, since gRPC does not work "
    'there: start processes with multiprocessing.get_context("spawn"), or fork before the first executor'
)


class Creator:
    """The process that created an object."""

    def __init__(self) -> None:
        self._pid = os.getpid()

    @property
    def is_elsewhere(self) -> bool:
        """Whether this process is a fork of the creator."""
        return os.getpid() != self._pid

    def check(self) -> None:
        """Raises RuntimeError in a fork of the creator."""
        if self.is_elsewhere:
            raise RuntimeError(FORKED)


def remove_with(owner: object, folder: Path) -> weakref.finalize:  # type: ignore[type-arg]
    """Remove the folder when the owner is garbage-collected, when the program ends, and when the result is called.

    A fork does not remove it.
    """
    return weakref.finalize(owner, _remove, Creator(), folder)


def _remove(creator: Creator, folder: Path) -> None:
    if not creator.is_elsewhere:
        rmtree(folder, ignore_errors=True)
