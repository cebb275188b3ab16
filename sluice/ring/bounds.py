"""What numbers and texts on the wire may be. Checked on decoding, so what has been decoded can be computed with."""

from typing import Annotated

from msgspec import Meta

MAX_SEQUENCES = 128
"""Of one request."""
MAX_STOP_CHARS = 1 << 20
"""Of all stop strings of a request together: each takes some hundred bytes in the search for them."""

Number = Annotated[int, Meta(ge=0)]
"""Names something: a request, an epoch, a lane. 64 bits."""
Count = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
"""Of tokens, blocks, requests; also an index or an attempt. What the public API can carry."""
Total = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
"""A count that only grows."""
TokenId = Annotated[int, Meta(ge=0, le=(1 << 32) - 1)]
Index = Annotated[int, Meta(ge=0, lt=MAX_SEQUENCES)]
"""Of a sequence in its request."""
Sequences = Annotated[int, Meta(ge=1, le=MAX_SEQUENCES)]
Finite = Annotated[float, Meta(ge=-1e15, le=1e15)]
"""No NaN, no infinity."""
Seconds = Annotated[float, Meta(ge=0, le=1e15)]
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
