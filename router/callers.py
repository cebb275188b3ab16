"""Who makes a call, and the call itself as the services see it."""

import re
from dataclasses import dataclass
from typing import Any, TypeAlias

from grpc import aio

Call: TypeAlias = aio.ServicerContext[Any, Any]

TENANT = re.compile(r"[A-Za-z0-9._:-]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls, as far as anybody asked. Raises ValueError for a tenant that is no name."""

    tenant: str = ""
    """Up to 64 of `[A-Za-z0-9._:-]`; empty: nobody in particular."""
    admin: bool = False
    """May call AdminService."""

    def __post_init__(self) -> None:
        if not isinstance(self.tenant, str) or (self.tenant and not TENANT.fullmatch(self.tenant)):
            raise ValueError("a tenant is named by up to 64 of [A-Za-z0-9._:-]")


class Context:
    """What an answer needs of its call."""

    __slots__ = ("abort", "caller", "send_initial_metadata", "write")

    def __init__(self, call: Call, caller: Caller) -> None:
        self.caller = caller
        self.write = call.write
        self.send_initial_metadata = call.send_initial_metadata
        self.abort = call.abort
