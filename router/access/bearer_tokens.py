"""Bearer tokens: a file that says to whom each belongs. Only their SHA-256 is kept."""

import hashlib
import hmac
import re
from collections.abc import Mapping
from pathlib import Path

from router.access.principal import Principal

SHORTEST_TOKEN = 16
HASHED = re.compile(r"sha256:([0-9a-f]{64})", re.ASCII)
KEY_BYTES = 8


class Tokens:
    """Who has which token."""

    def __init__(self, callers: Mapping[bytes, Principal]) -> None:
        """`callers` by the SHA-256 of their token."""
        self._by_key: dict[bytes, list[tuple[bytes, Principal]]] = {}
        for digest, caller in callers.items():
            self._by_key.setdefault(digest[:KEY_BYTES], []).append((digest, caller))

    def find(self, token: str) -> Principal | None:
        """Whose it is; None for an unknown one."""
        digest = _digest(token)
        found = [
            caller for known, caller in self._by_key.get(digest[:KEY_BYTES], ()) if hmac.compare_digest(known, digest)
        ]
        return found[0] if found else None


def read_tokens(path: str) -> Tokens:
    """A file of lines `TOKEN TENANT [admin]`, where TOKEN may be `sha256:` and 64 hexadecimal digits; # comments.

    Raises OSError, or ValueError with the number of the bad line. No message ever holds what stands in the file.
    """
    found: dict[bytes, Principal] = {}
    try:
        lines = Path(path).read_text("utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8 text") from error
    for number, line in enumerate(lines, 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            digest, caller = _parse(words)
        except ValueError as error:
            raise ValueError(f"{path} line {number}: {error}") from None
        if digest in found:
            raise ValueError(f"{path} line {number}: the token stands there twice")
        found[digest] = caller
    if not found:
        raise ValueError(f"{path} holds no token")
    return Tokens(found)


def _parse(words: list[str]) -> tuple[bytes, Principal]:
    if len(words) not in (2, 3) or (len(words) == 3 and words[2] != "admin"):
        raise ValueError("must be TOKEN TENANT or TOKEN TENANT admin")
    hashed = HASHED.fullmatch(words[0])
    if words[0].startswith("sha256:") and not hashed:
        raise ValueError("sha256: must be followed by 64 hexadecimal digits in lower case")
    if len(words[0]) < SHORTEST_TOKEN:
        raise ValueError(f"the token has {len(words[0])} characters, must have at least {SHORTEST_TOKEN}")
    digest = bytes.fromhex(hashed[1]) if hashed else _digest(words[0])
    return digest, Principal(words[1], admin=len(words) == 3)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
