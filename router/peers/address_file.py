"""Files that list addresses of peers (`file:///path`), written for example by a launcher."""

import stat
from collections.abc import Callable
from pathlib import Path

from structlog.stdlib import BoundLogger

from router.peers.address import FILE_PREFIX, Address, AddressError, parse

MAX_FILE_BYTES = 1 << 20
MAX_ADDRESSES = 4096


class AddressFile:
    """A file with one address per line; `#` starts a comment. To change the file, rename a new one onto it.

    Raises AddressError if `entry` is not an absolute path.
    """

    def __init__(self, entry: str, check: Callable[[str], None], log: BoundLogger) -> None:
        """`check` raises ValueError for an address that must not be used."""
        self.path = Path(entry.removeprefix(FILE_PREFIX))
        if not self.path.is_absolute() or self.path == Path("/"):
            raise AddressError(f"{entry!r} needs an absolute path: file:///path")
        self._check = check
        self._log = log
        self._last: tuple[Address, ...] = ()
        self._failure = ""

    def read(self) -> tuple[Address, ...]:
        """The addresses in the file. If it cannot be read or has an invalid line, the previous ones. May block."""
        try:
            self._last = self._parse(self._text())
        except (OSError, ValueError) as error:
            # Log each reason once, since the file is read every few seconds.
            if str(error) != self._failure:
                self._failure = str(error)
                details = {"error": self._failure, "kept": len(self._last)}
                self._log.warning("address_file_failed", file=str(self.path), **details)
        else:
            self._failure = ""
        return self._last

    def _text(self) -> str:
        # Reject pipes, whose reader would block forever.
        status = self.path.stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_FILE_BYTES:
            raise AddressError(f"not a regular file of at most {MAX_FILE_BYTES} bytes")
        return self.path.read_text(encoding="utf-8")

    def _parse(self, text: str) -> tuple[Address, ...]:
        addresses: dict[str, Address] = {}
        for number, line in enumerate(text.splitlines(), 1):
            entry = line.partition("#")[0].strip()
            if not entry:
                continue
            try:
                addresses[entry] = parse(entry)
                self._check(entry)
            except ValueError as error:
                raise AddressError(f"line {number}: {error}") from None
        if len(addresses) > MAX_ADDRESSES:
            raise AddressError(f"{len(addresses)} addresses, at most {MAX_ADDRESSES} are allowed")
        return tuple(addresses.values())
