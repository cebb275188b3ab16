"""What the template process is asked for, as one message on a socket."""

import msgspec

MAX_BYTES = 1 << 17


class Order(msgspec.Struct, frozen=True):
    """One service to start. Its descriptors are sent along with the message."""

    module: str
    """Run as `python -m module`."""
    arguments: list[str]
    environment: dict[str, str]
    folder: str
    parent: int
    """Pid of the process that becomes the service's parent."""
    descriptors: list[int]
    """The number that each of the sent descriptors gets in the service."""
    new_session: bool
    group: int
    """The service's process group; 0: its own; -1: its parent's."""
