"""What all messages of the ring share: the base class, the version, and the types of fields.

Bounds are checked when a message is decoded, so receivers can rely on them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 11
"""Incremented with every incompatible change. An inbox drops frames of another version."""

MAX_SEQUENCES = 128
"""Maximum number of sequences per request."""

Number = Annotated[int, Meta(ge=0)]
"""Identifies a request, an epoch or a lane: 64 random bits."""
Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of tokens, blocks or requests; also an index or the number of an attempt. 32 bits, as in the public API."""
Total = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A count that never decreases."""
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Index = Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
"""Index of a sequence in its request."""
Sequences = Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""Neither NaN nor infinite."""
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
Name = Annotated[str, Meta(max_length=1024)]
"""An id or an address."""
Moment = Annotated[float, Meta(ge=0, le=2.5e11)]
"""Seconds of the Unix epoch, up to about the year 9900."""
Retention = Annotated[int, Meta(ge=0, le=100)]
Logprobs = Annotated[int, Meta(ge=0, le=20)]
Priority = Annotated[int, Meta(ge=0, le=9)]
Salt = Annotated[str, Meta(max_length=1 << 16)]


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of the messages that lanes carry."""
