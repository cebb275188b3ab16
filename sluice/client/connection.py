"""What both clients share about their channel."""

from typing import Any

import grpc

DEFAULT_ADDRESS = "127.0.0.1:50051"
MAX_MESSAGE_BYTES = 64 << 20

CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

Metadata = tuple[tuple[str, str], ...]
"""Sent with every call, such as (("authorization", "Bearer …"),)."""


def open_channel(api: Any, address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """A channel of `api`, which is grpc or grpc.aio; without credentials in plain text."""
    if credentials is None:
        return api.insecure_channel(address, CHANNEL_OPTIONS)
    return api.secure_channel(address, credentials, CHANNEL_OPTIONS)
