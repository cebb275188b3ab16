"""Hooks of the documentation's site, which rewrite links that leave docs/ to the repository's host."""

import posixpath
import re
from typing import Any

LINK = re.compile(r"\]\(((?:\.\./)+[^)\s]*)\)")
DOCS = "docs"


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """MkDocs calls this for every page."""
    folder = posixpath.join(DOCS, posixpath.dirname(page.file.src_uri))

    def absolute(match: re.Match[str]) -> str:
        path, hash_, anchor = match[1].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        if target == DOCS or target.startswith(f"{DOCS}/"):
            return match[0]
        return f"]({config.repo_url}/blob/main/{target}{hash_}{anchor})"

    return LINK.sub(absolute, markdown)
