"""The authenticated caller of a request. Operators' authentication functions import this module."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

from router.errors import Call

TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Principal:
    """The caller of a request. Raises ValueError for an invalid tenant name."""

    tenant: str = ""
    """Up to 64 characters of `[A-Za-z0-9._:-]`; empty for no tenant."""
    admin: bool = False
    """Whether the caller may call AdminService."""

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or (self.tenant and not TENANT.fullmatch(self.tenant)):
            raise ValueError("a tenant's name must have 1 to 64 characters of [A-Za-z0-9._:-]")


Admit: TypeAlias = Callable[[Call], Awaitable[Principal]]
"""Authenticates a call. Raises RequestError."""
