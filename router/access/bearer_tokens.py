"""Bearer tokens and their owners, read from a file. Only the SHA-256 of a token is kept in memory."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from router.access.principal import Principal

SHORTEST_TOKEN = 16
"""Characters."""
HASHED = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
KEY_BYTES = 8
"""Length of the digest's prefix that is used as the dictionary key."""


class BearerTokens:
    def __init__(self, callers: Mapping[bytes, Principal]) -> None:
        """`callers` are keyed by the SHA-256 of the token."""
        # Looking up the whole digest in a dict would leak it by timing. So look up a prefix, then compare in constant
        # time.
        self._by_key: dict[bytes, list[tuple[bytes, Principal]]] = {}
        for digest, caller in callers.items():
            self._by_key.setdefault(digest[:KEY_BYTES], []).append((digest, caller))

    def find(self, token: str) -> Principal | None:
        """The owner of a token; None if the token is unknown."""
        digest = _digest(token)
        candidates = self._by_key.get(digest[:KEY_BYTES], ())
        return next((caller for known, caller in candidates if hmac.compare_digest(known, digest)), None)


def read_tokens(path: str) -> BearerTokens:
    """Reads lines `TOKEN TENANT [admin]`; TOKEN may be `sha256:` and 64 hexadecimal digits; `#` begins a comment.

    Raises OSError, or ValueError with the number of the bad line. No message quotes the file.
    """
    callers: dict[bytes, Principal] = {}
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            digest, caller = _parse(words)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        if digest in callers:
            raise ValueError(f"{path} line {number}: duplicate token")
        callers[digest] = caller
    if not callers:
        raise ValueError(f"{path} has no tokens")
    return BearerTokens(callers)


def _parse(words: list[str]) -> tuple[bytes, Principal]:
    if len(words) not in (2, 3) or (len(words) == 3 and words[2] != "admin"):
        raise ValueError("must be TOKEN TENANT or TOKEN TENANT admin")
    hashed = HASHED.fullmatch(words[0])
    if words[0].startswith("sha256:") and not hashed:
        raise ValueError("sha256: must be followed by 64 lower-case hexadecimal digits")
    if len(words[0]) < SHORTEST_TOKEN:
        raise ValueError(f"the token has {len(words[0])} characters, must have at least {SHORTEST_TOKEN}")
    digest = bytes.fromhex(hashed[1]) if hashed else _digest(words[0])
    return digest, Principal(words[1], admin=len(words) == 3)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
