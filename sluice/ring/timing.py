"""Intervals and silences that services must agree on, in seconds: what one sends every so often, others wait for.

tests/ring/test_timing.py checks the inequalities between them, and the settings' defaults against them.
"""

HELLO_SECONDS = 1.0
"""router → engine, detokenizer."""
HEARTBEAT_SECONDS = 0.5
"""engine, detokenizer → router."""
KEEP_ALIVE_SECONDS = 1.0
"""engine → detokenizer. Sent by the step loop, so a long step delays it."""

RECONNECT_SECONDS = 0.05
"""From the end of a connection until the first attempt at another one. If that is refused, the process has died."""
WATCH_SECONDS = 0.05
"""Interval at which a router checks the connections to its peers."""
DEATH_SECONDS = 0.3
"""A router notices the death of a process within this time, if the kernel closes its connections at once."""
HUNG_UP_SECONDS = 2 * HEARTBEAT_SECONDS
"""A router's patience with a peer whose connection ended, while it is unknown whether its process has: one that lives,
and was only cut off, has sent a heartbeat over a new connection by then."""
ROUTER_SILENCE_SECONDS = 30.0
"""Without a hello for this long a router is lost: its requests and streams end, and it gets no more heartbeats."""
DRAINING_ROUTER_SILENCE_SECONDS = 4.0
"""The same for a detokenizer that only this router keeps from exiting."""
ENGINE_SILENCE_SECONDS = 600.0
"""Without a frame for this long an engine is lost to a detokenizer. Routers notice within seconds; this only frees
what no router dropped, so it may exceed the longest step."""
DOUBTFUL_ENGINE_SILENCE_SECONDS = 30.0
"""The same for an engine that was probably replaced, or whose router's Drop was probably lost: long enough for frames
that are still on their way."""

CUT_OFF_SECONDS = 4.0
"""A lane from an engine to a detokenizer that accepts nothing for this long is cut off: routers move its streams."""
LANE_FORGET_SECONDS = 60.0
"""After this long the rows that such a lane holds are dropped, and a lane that no request uses is closed."""
CUT_OFF_FORGET_SECONDS = 600.0
"""LANE_FORGET_SECONDS of an unused lane that is cut off: while it exists, the engine notices when it reconnects, and
until then routers place nothing behind it."""

DRAIN_NOTICE_SECONDS = 2 * HEARTBEAT_SECONDS
"""From the first heartbeat that says draining until routers place nothing more there."""
DRAIN_SETTLE_SECONDS = 2 * HEARTBEAT_SECONDS
"""From a draining peer's first heartbeat that says so until routers move its requests: if the whole ring is being
stopped, the other peers have said so too by then, and the requests stay."""
CACHE_REPORT_SECONDS = 3.0
"""From a request's first token until the engine has reported its blocks to the router, or evicted them."""
