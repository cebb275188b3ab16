"""What all messages of the ring share: base class, version, and the types of their fields.

Bounds are checked on decoding, so a receiver can compute with whatever has been decoded.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

VERSION = 8
"""Grows with every incompatible change; a lane refuses frames of another version."""

MAX_SEQUENCES = 128
"""Per request."""
MAX_WORD_TOKENS = 1024
"""Of a bad word."""
MAX_WORDS_TOKENS = 4096
"""Of all bad words of a request together: an engine's step loop takes some microseconds for each."""
MAX_DRAFT_LOGITS_BYTES = 8 << 20
"""A quarter of a frame, and half of what a router accepts from a client by default."""
MAX_STOP_CHARS = 1 << 20
"""In all stop strings of a request together: the search for them takes some hundred bytes per character."""

Number = Annotated[int, Meta(ge=0)]
"""Identifies a request, an epoch or a lane: 64 random bits."""
Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Of tokens, blocks or requests; also an index or an attempt. 32 bits, as in the public API."""
Total = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A count that never decreases."""
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Word = Annotated[tuple[TokenId, ...], Meta(min_length=2, max_length=MAX_WORD_TOKENS)]
"""Token ids of a word of several."""
NgramSize = Annotated[int, Meta(ge=0, le=16)]
Index = Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
"""Of a sequence in its request."""
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
"""Choices are sent as JSON, in which a byte may take six."""


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of everything that a lane carries."""
