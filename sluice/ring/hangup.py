"""Whether the receiver of a lane hung up, which a process does when it dies, however it dies."""

import secrets

import zmq
from zmq.utils.monitor import recv_monitor_message

EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class HangUp:
    """Watches the connections of a socket that has made none yet (zmq_socket_monitor(3)). Not thread-safe."""

    def __init__(self, socket: "zmq.Socket[bytes]") -> None:
        self._socket = socket
        # By default it is named after a descriptor, which may be in use again before the name is free.
        self._events = socket.get_monitor_socket(EVENTS, f"inproc://monitor.{secrets.token_hex(8)}")
        self._seen = False

    def seen(self) -> bool:
        """Whether the latest news is an end, not a beginning. While keys are changed it may say so of a connection that
        is there, for others are tried beside it.

        Has to be asked now and then: ZeroMQ's own thread waits once a thousand events have not been looked at.
        """
        while self._events.poll(0):
            self._seen = recv_monitor_message(self._events)["event"] == zmq.Event.DISCONNECTED
        return self._seen

    def close(self) -> None:
        """Comes before the socket's own."""
        self._socket.disable_monitor()
        self._events.close()
