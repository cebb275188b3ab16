import asyncio
import time

import pytest
import structlog
import zmq

from router.peers.inbox import BATCH_MESSAGES, RouterInbox
from sluice.lanes.lane import Lane
from tests.fakes.lanes import connected
from tests.fakes.rows import text_batch

MESSAGES = 3 * BATCH_MESSAGES + 7


@pytest.fixture
def context():
    context = zmq.Context()
    yield context
    context.term()


def numbered(i):
    return text_batch(str(i), [], [])


async def test_all_waiting_messages_are_read_without_another_wake_up(context, folder):
    """The descriptor is edge-triggered, so a missed change would never be reported again."""
    received = []

    def handle(message):
        received.append(message.detokenizer)
        if len(received) % 10 == 3:
            raise ValueError("one bad message")

    logs = []

    def record(_, __, event):
        logs.append(event)
        raise structlog.DropEvent

    logger = structlog.wrap_logger(None, processors=[record])
    inbox = RouterInbox(context, f"ipc://{folder}/inbox", handle, logger)
    lane = connected(Lane(context, inbox.address, capacity=2 * MESSAGES))
    sent = 0
    while sent < MESSAGES:
        sent += lane.send(numbered(sent))
    await asyncio.sleep(0.1)
    try:
        inbox.start()
        turns, deadline = 0, time.monotonic() + 60
        while len(received) < MESSAGES:
            await asyncio.sleep(0)
            turns += 1
            assert time.monotonic() < deadline
        assert received == [str(i) for i in range(MESSAGES)]
        assert turns >= MESSAGES // BATCH_MESSAGES, "other tasks did not run between the batches"
        assert any(log["event"] == "message_failed" for log in logs)
        assert lane.send(numbered(MESSAGES)), "a lane that was emptied has room"
        async with asyncio.timeout(60):
            while len(received) == MESSAGES:
                await asyncio.sleep(0.001)
    finally:
        lane.close()
        inbox.close()


async def test_malformed_frames_neither_block_the_loop_nor_hide_later_messages(folder, context):
    received = []
    inbox = RouterInbox(context, f"ipc://{folder}/inbox", received.append, structlog.get_logger())
    stranger = context.socket(zmq.PUSH)
    stranger.set(zmq.LINGER, 0)
    stranger.connect(inbox.address)
    # More than one batch, but less than the socket buffers.
    count = BATCH_MESSAGES + BATCH_MESSAGES // 2
    for _ in range(count):
        stranger.send(b"rubbish")
    lane = connected(Lane(context, inbox.address))
    assert lane.send(numbered(0))
    await asyncio.sleep(0.1)
    try:
        inbox.drain()
        assert inbox.malformed == 0
        inbox.start()
        inbox.drain()
        assert inbox.malformed <= BATCH_MESSAGES
        async with asyncio.timeout(60):
            while inbox.malformed < count or not received:
                await asyncio.sleep(0.001)
        assert [message.detokenizer for message in received] == ["0"]
    finally:
        stranger.close()
        lane.close()
        inbox.close()
