"""Answers of other ranks, through a real store; only the channel is a fake."""

from datetime import timedelta

import pytest
from torch.distributed import DistError, TCPStore

from engine_worker.parallel.commands import Heartbeat, encode
from engine_worker.parallel.group import StoredAnswers, store_answer
from sluice.wire.calls import RankAnswer, failed
from tests.fakes.command_sender import CommandSender


@pytest.fixture
def store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, 1, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))


@pytest.fixture
def sender() -> CommandSender:
    """A sender to ranks 1 to 3 that has sent one command."""
    sender = CommandSender(4)
    sender.send(encode(Heartbeat()))
    return sender


def test_waits_for_all_ranks_to_complete_the_command(store, sender):
    answers = StoredAnswers(store, sender, 5, sent=1, ranks=[1, 3])
    store_answer(store, 5, 1, RankAnswer(1, '"é"'))
    store_answer(store, 5, 3, failed(3, "no"))
    store_answer(store, 6, 1, RankAnswer(1, "6"))
    sender.through[1] = 1
    assert answers.poll() is None
    sender.through[3] = 1
    assert answers.poll() == [RankAnswer(1, '"é"'), failed(3, "no")]
    # The answers of a completed call are deleted.
    assert "was lost" in answers.poll()[0].error
    assert StoredAnswers(store, sender, 6, sent=1, ranks=[1]).poll() == [RankAnswer(1, "6")]


def test_missing_and_broken_answers(store, sender):
    sender.keeps_up = True
    store.set("sluice/call/5/2", "{")
    lost, broken = StoredAnswers(store, sender, 5, sent=1, ranks=[1, 2]).poll()
    assert (lost.rank, lost.error) == (1, "its answer was lost; it may have run the method")
    assert broken.rank == 2
    assert broken.error.startswith("its answer cannot be read: ")


def test_a_store_that_cannot_be_reached(sender):
    class Gone:
        def check(self, _):
            raise DistError("Broken pipe")

    sender.keeps_up = True
    (answer,) = StoredAnswers(Gone(), sender, 5, sent=1, ranks=[1]).poll()
    assert answer == failed(1, "its answer cannot be read: Broken pipe")


def test_no_other_rank_is_named(store, sender):
    assert StoredAnswers(store, sender, 5, sent=1, ranks=[]).poll() == []
