"""The pool files with one layout, as those who read them see them."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

from engine_worker.pool_files.layout import Layout
from engine_worker.pool_files.peer_file import Found, PeerFile

SUFFIX: Final = ".pool"
SETTLED_SECONDS: Final = 0.1
"""Age at which a folder's time of change surely tells changes apart; file systems count in ticks."""


class PeerFiles:
    def __init__(self, folder: Path, layout: Layout, own: str | None = None) -> None:
        """`folder`: that of the layout; there is nothing if it does not exist. `own`: path of a file to leave out."""
        self._folder = folder
        self._layout = layout
        self._own = own
        self._peers: dict[str, PeerFile] = {}
        self._seen = -1
        """Time of change of the folder when its files were last listed; -1: to be listed again."""

    def __iter__(self) -> Iterator[PeerFile]:
        return iter(self._peers.values())

    def refresh(self) -> bool:
        """Look for new files. Returns whether there are any files. Call it in one thread."""
        if (changed := self._changed()) != self._seen:
            self._seen = changed if time.time_ns() - changed > SETTLED_SECONDS * 1e9 else -1
            self._open()
        return bool(self._peers)

    def find(self, digest: bytes) -> Iterator[Found]:
        """The blocks with this hash, each in another file."""
        for peer in self:
            with suppress(OSError):  # The file was truncated or cannot be read: like a block that is not there.
                if (found := peer.find(digest)) is not None:
                    yield found

    def _changed(self) -> int:
        try:
            return os.stat(self._folder).st_mtime_ns
        except OSError:  # Deleted: there is nothing to find.
            return 0

    def _open(self) -> None:
        peers = dict[str, PeerFile]()
        for path in sorted(str(path) for path in self._folder.glob(f"*{SUFFIX}") if str(path) != self._own):
            # Not yet complete, or none of ours: it is tried again with the next change.
            with suppress(OSError, ValueError):
                peers[path] = self._peers.get(path) or PeerFile(path, self._layout)
        # Replaced, because another thread may be using the old one. Files that are gone are closed: they would keep
        # their memory.
        self._peers = peers
