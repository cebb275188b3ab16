import os
import socket

from sluice.host.listener import LISTENER_VARIABLE, bound, inherited


def test_sockets_have_the_protocol_without_which_asyncio_delays_small_parts():
    with bound("127.0.0.1", 0) as listener:
        shared = inherited({LISTENER_VARIABLE: str(os.dup(listener.fileno()))})
        assert shared is not None
        with shared:
            assert [each.proto for each in (listener, shared)] == [socket.IPPROTO_TCP] * 2
    assert inherited({}) is None
