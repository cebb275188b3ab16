"""Intervals and timeouts in seconds on which services must agree, because some wait for what others send.

tests/wire/test_timing.py checks the inequalities between them, and the defaults of settings against them.
"""

HELLO_SECONDS = 1.0
"""Interval of hellos, router → engine, detokenizer."""
HEARTBEAT_SECONDS = 0.5
"""Interval of heartbeats, engine, detokenizer → router."""
KEEP_ALIVE_SECONDS = 1.0
"""Interval of keep-alives, engine → detokenizer. The step loop sends them, so a long step delays them."""

RECONNECT_SECONDS = 0.05
"""Time from the end of a connection to the first attempt to reconnect. If it is refused, the process has died."""
WATCH_SECONDS = 0.05
"""Interval at which a router checks the connections to its peers."""
DEATH_SECONDS = 0.3
"""Time within which a router detects the death of a process whose connections the kernel closes immediately."""
HUNG_UP_SECONDS = 2 * HEARTBEAT_SECONDS
"""Time that a router waits for a peer whose connection ended, while it is unknown whether the process has died. A
process that is alive and only lost the connection has sent a heartbeat over a new one by then."""
ROUTER_SILENCE_SECONDS = 30.0
"""Time without a hello after which a router is lost: its requests and streams end, and heartbeats to it stop."""
DRAINING_ROUTER_SILENCE_SECONDS = 4.0
"""ROUTER_SILENCE_SECONDS for a draining detokenizer that waits only for this router."""
ENGINE_SILENCE_SECONDS = 600.0
"""Time without a frame after which an engine is lost to a detokenizer. Routers detect a loss within seconds; this only
frees streams that no router dropped, so it may exceed the longest step."""
DOUBTFUL_ENGINE_SILENCE_SECONDS = 30.0
"""ENGINE_SILENCE_SECONDS of an engine that was probably replaced, or whose router's Drop was probably lost. Long enough
for frames in transit."""

CUT_OFF_SECONDS = 4.0
"""Time without an accepted message after which an engine's lane to a detokenizer is cut off. Routers then move its
streams."""
LANE_FORGET_SECONDS = 60.0
"""Time after which the rows of a lane that is cut off are dropped, and a lane that no request uses is closed."""
CUT_OFF_FORGET_SECONDS = 600.0
"""LANE_FORGET_SECONDS of an unused lane that is cut off. As long as it exists, the engine detects that it reconnects;
until then routers place no requests behind it."""

DRAIN_NOTICE_SECONDS = 2 * HEARTBEAT_SECONDS
"""Time from the first heartbeat of a draining peer until routers place no more requests there."""
DRAIN_SETTLE_SECONDS = 2 * HEARTBEAT_SECONDS
"""Time from the first heartbeat of a draining peer until routers move its requests. If the whole ring is stopping, the
other peers have reported that by then too, and the requests are not moved."""
CACHE_REPORT_SECONDS = 3.0
"""Time from a request's first token until the engine has reported the request's blocks to the router or evicted them.
"""
