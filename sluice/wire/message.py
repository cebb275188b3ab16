"""What all messages of the ring share: the base class, the version, and the types of fields.

Bounds are checked when a message is decoded, so receivers can rely on them.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 10
"""Incremented with every incompatible change. An inbox drops frames of another version."""

MAX_SEQUENCES = 128
"""Maximum number of sequences per request."""
MAX_WORD_TOKENS = 1024
"""Maximum number of tokens in a bad word."""
MAX_WORDS_TOKENS = 4096
"""Maximum number of tokens in all bad words of a request. Each costs the engine's step loop a few microseconds."""
MAX_DRAFT_LOGITS_BYTES = 8 << 20
"""A quarter of the maximum frame, and half of the message that a router accepts from a client by default."""
MAX_STOP_CHARS = 1 << 20
"""Maximum number of characters in all stop strings of a request. Each needs about a hundred bytes of memory."""

Number = Annotated[int, Meta(ge=0)]
"""Identifies a request, an epoch or a lane: 64 random bits."""
Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Number of tokens, blocks or requests; also an index or the number of an attempt. 32 bits, as in the public API."""
Total = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A count that never decreases."""
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Word = Annotated[tuple[TokenId, ...], Meta(min_length=2, max_length=MAX_WORD_TOKENS)]
"""Token ids of a word of several tokens."""
NgramSize = Annotated[int, Meta(ge=0, le=16)]
Index = Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
"""Index of a sequence in its request."""
Sequences = Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""Neither NaN nor infinite."""
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
Threshold = Annotated[float, Meta(gt=0, le=1)]
Name = Annotated[str, Meta(max_length=1024)]
"""An id or an address."""
Amount = Annotated[float, Meta(ge=0, le=1e15)]
Positive = Annotated[float, Meta(gt=0, le=1e15)]
Part = Annotated[float, Meta(ge=0, le=1)]
Moment = Annotated[float, Meta(ge=0, le=2.5e11)]
"""Seconds of the Unix epoch, up to about the year 9900."""
Retention = Annotated[int, Meta(ge=0, le=100)]
Logprobs = Annotated[int, Meta(ge=0, le=20)]
Priority = Annotated[int, Meta(ge=0, le=9)]
Salt = Annotated[str, Meta(max_length=1 << 16)]
GuideText = Annotated[str, Meta(max_length=1 << 20)]
"""Larger than the public limit, because choices are sent as JSON, in which one byte may take six."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base class of the messages that lanes carry."""
