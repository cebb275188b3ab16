"""Blocks that are copied to a host pool in a file as soon as they are full."""

from pathlib import Path

import pytest

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.step import Content, Move, MoveKind
from sluice.wire.hashing import short_hash
from sluice.wire.params import RangeRetention, RetentionParams
from tests.engine_worker.kvcache.sequences import computed, one
from tests.fakes.cache_follower import CacheFollower, contents
from tests.fakes.scripted_cache import FileBlocks

SIZE = 4
EAGERLY = RetentionParams((RangeRetention(0, 1000, 100),))


class Saving:
    """A KV cache without an engine, whose host pool is a file."""

    def __init__(self, folder: Path, num_blocks: int = 8, num_host_blocks: int = 12) -> None:
        view = PoolFolder(folder, "a", print)
        file = view.open(FileBlocks.layout(SIZE, on_host=True), "", lambda: num_host_blocks)
        assert file is not None
        self.file: PoolFile = file
        self.now = 0.0
        options = {"event_buffer": 1000, "clock": lambda: self.now}
        self.cache = KvCacheManager(num_blocks, SIZE, num_host_blocks=num_host_blocks, file=file, **options)
        self.tiers = self.cache.tiers
        self.follower = CacheFollower()

    @property
    def in_file(self) -> set[bytes]:
        return {self.file._hash[block].tobytes() for block in range(self.file.num_blocks) if self.file._valid[block]}

    def step(self) -> tuple[Move, ...]:
        """Take and complete the pending moves."""
        moves = self.tiers.take_moves()
        self.tiers.complete(moves)
        self.check()
        return moves

    def check(self) -> None:
        self.cache.check()
        self.follower.read(self.tiers.events)
        assert self.follower.blocks == contents(self.tiers)
        both = [*self.tiers.device.contents(), *self.tiers.host.contents()]
        assert set(self.tiers.journal.since(0).stored) == {short_hash(content.hash) for _, content in both}


@pytest.fixture
def saving(shared_memory: Path) -> Saving:
    return Saving(shared_memory)


def hashes(sequence, count: int) -> set[bytes]:
    return {content.hash for content in sequence.chain[:count]}


def test_a_full_block_is_copied_once_with_the_next_step(saving: Saving):
    sequence = computed(saving.cache, range(9))
    saving.check()
    assert saving.tiers.saving
    assert saving.step() == tuple(
        Move(MoveKind.SAVE, block, target) for target, block in enumerate(sequence.blocks[:2])
    )
    assert not saving.tiers.saving
    assert saving.step() == ()


def test_an_entry_is_written_when_the_step_with_the_copy_is_complete(saving: Saving):
    sequence = computed(saving.cache, range(9))
    assert not saving.in_file
    moves = saving.tiers.take_moves()
    assert not saving.in_file
    saving.tiers.complete(moves)
    assert saving.in_file == hashes(sequence, 2)


def test_the_sum_that_the_device_has_computed_is_noted(saving: Saving):
    computed(saving.cache, range(5))
    moves = saving.tiers.take_moves()
    saving.file.note_sum(moves[0].target, 1234)
    saving.tiers.complete(moves)
    assert saving.file._entries[moves[0].target]["sum"] == 1234
    assert saving.file.take_sum(moves[0].target) is None


def test_evicting_a_saved_block_copies_nothing(saving: Saving):
    saving.cache.release(computed(saving.cache, range(8)))
    saving.step()
    saving.cache.release(computed(saving.cache, range(50, 80)))
    assert {move.kind for move in saving.step()} == {MoveKind.SAVE}
    assert saving.tiers.evictions
    assert saving.tiers.offloads == 0


def test_a_block_that_is_evicted_before_its_copy_is_offloaded(saving: Saving):
    """Otherwise the next step could overwrite it while it is copied."""
    first = computed(saving.cache, range(8))
    blocks = first.blocks[:2]
    saving.cache.release(first)
    second = one(range(50, 80))
    assert saving.cache.allocate([second]) == [second]
    moves = saving.step()
    assert {(move.kind, move.source) for move in moves} == {(MoveKind.OFFLOAD, block) for block in blocks}
    assert saving.in_file == hashes(first, 2)


def test_a_copy_is_not_made_if_its_target_is_given_to_other_content(shared_memory: Path):
    saving = Saving(shared_memory, num_blocks=4, num_host_blocks=1)
    first = computed(saving.cache, range(4))
    saving.cache.release(first)
    saving.step()
    # Its copy replaces that of the first block, which is then evicted from the device.
    saving.cache.release(computed(saving.cache, range(50, 54)))
    third = one(range(60, 72))
    assert saving.cache.allocate([third]) == [third]
    saving.check()
    assert [move.kind for move in saving.step()] == [MoveKind.OFFLOAD]
    assert saving.in_file == hashes(first, 1)


def test_a_loaded_block_stays_on_the_host(saving: Saving):
    first = computed(saving.cache, range(8))
    saving.cache.release(first)
    saving.step()
    saving.cache.release(computed(saving.cache, range(50, 80)))
    saving.step()
    repeated = one(range(9))
    assert saving.cache.allocate([repeated]) == [repeated]
    assert repeated.num_computed == 8
    moves = saving.step()
    assert [move.kind for move in moves] == [MoveKind.ONLOAD] * 2
    assert saving.in_file >= hashes(first, 2)
    assert all(saving.tiers.device.find(content) is not None for content in first.chain[:2])


def test_content_that_is_computed_again_is_not_copied_again(saving: Saving):
    """The last block of a prompt is computed although it is on the host, because its last token is needed."""
    saving.cache.release(computed(saving.cache, range(8)))
    saving.step()
    saving.cache.release(computed(saving.cache, range(50, 82)))
    saving.step()
    computed(saving.cache, range(8))
    assert [move.kind for move in saving.step()] == [MoveKind.ONLOAD]


def test_a_full_host_evicts_the_ends_of_what_no_sequence_uses(shared_memory: Path):
    saving = Saving(shared_memory, num_host_blocks=3)
    first = computed(saving.cache, range(8))
    saving.cache.release(first)
    second = computed(saving.cache, range(50, 58))
    saving.check()
    # One copy was given up before it was made.
    assert [move.kind for move in saving.step()] == [MoveKind.SAVE] * 3
    assert saving.in_file == hashes(second, 2) | hashes(first, 1)
    # Content that is still on the device is not lost.
    assert saving.tiers.device.find(first.chain[1]) is not None


def test_the_beginning_of_a_long_sequence_is_not_evicted_for_its_end(shared_memory: Path):
    saving = Saving(shared_memory, num_host_blocks=3)
    sequence = computed(saving.cache, range(24))
    saving.step()
    assert saving.in_file == hashes(sequence, 3)


def test_a_prefix_that_is_used_again_is_evicted_last(shared_memory: Path):
    saving = Saving(shared_memory, num_host_blocks=5)
    first = computed(saving.cache, range(8))
    saving.cache.release(first)
    saving.cache.release(computed(saving.cache, range(50, 58)))
    saving.step()
    repeated = one(range(9))
    assert saving.cache.allocate([repeated]) == [repeated]
    saving.cache.release(computed(saving.cache, range(70, 84)))
    saving.step()
    assert saving.in_file >= hashes(first, 2)


def test_the_host_keeps_the_priority_of_an_evicted_block(shared_memory: Path):
    saving = Saving(shared_memory, num_blocks=4, num_host_blocks=6)
    first = computed(saving.cache, range(8), EAGERLY)
    saving.cache.release(first)
    saving.step()
    for start in (20, 40, 60):
        saving.cache.release(computed(saving.cache, range(start, start + 16)))
        saving.step()
    assert saving.in_file >= hashes(first, 2)


def test_a_loaded_prefix_is_in_use_again(shared_memory: Path):
    saving = Saving(shared_memory, num_host_blocks=10)
    first = computed(saving.cache, range(8))
    saving.cache.release(first)
    saving.cache.release(computed(saving.cache, range(50, 82)))
    saving.step()
    repeated = one(range(9))
    assert saving.cache.allocate([repeated]) == [repeated]
    saving.step()
    for start in (20, 60):
        saving.cache.release(computed(saving.cache, range(start, start + 20)))
        saving.step()
    assert saving.in_file >= hashes(first, 2)


def test_only_the_priority_on_the_device_is_reported(saving: Saving):
    briefly = RetentionParams((RangeRetention(0, 1000, 100, 5.0),))
    saving.cache.release(computed(saving.cache, range(8), briefly))
    saving.step()
    saving.now = 10.0
    assert saving.tiers.host.lowest_priority() == 35
    saving.check()
    assert saving.tiers.device.lowest_priority() == 35
    saving.check()


def test_a_low_priority_copy_does_not_replace_higher_ones(shared_memory: Path):
    saving = Saving(shared_memory, num_blocks=4, num_host_blocks=2)
    first = computed(saving.cache, range(8), EAGERLY)
    saving.cache.release(first)
    saving.step()
    saving.cache.release(computed(saving.cache, range(40, 48)))
    assert saving.step() == ()
    assert saving.in_file == hashes(first, 2)


def test_copies_that_a_failed_step_should_have_made_are_dropped(saving: Saving):
    sequence = computed(saving.cache, range(9))
    moves = saving.tiers.take_moves()
    saving.tiers.ended(moves)
    assert saving.cache.undo(moves) == []
    saving.check()
    assert list(saving.tiers.host.contents()) == []
    assert not saving.in_file
    # On the device it is still valid.
    assert saving.tiers.device.find(sequence.chain[0]) is not None


def test_copies_that_no_step_will_make_are_dropped(saving: Saving):
    computed(saving.cache, range(9))
    assert saving.cache.undo(saving.tiers.drop_moves()) == []
    assert saving.tiers.pending == []
    saving.check()


def test_a_block_that_could_not_be_loaded_is_still_on_the_host(saving: Saving):
    first = computed(saving.cache, range(8))
    saving.cache.release(first)
    saving.step()
    saving.cache.release(computed(saving.cache, range(50, 80)))
    saving.step()
    repeated = one(range(9))
    saving.cache.allocate([repeated])
    moves = saving.tiers.take_moves()
    saving.tiers.ended(moves)
    assert saving.cache.undo(moves) == [repeated]
    saving.cache.release(repeated)
    saving.check()
    assert saving.in_file >= hashes(first, 2)


def test_a_host_block_that_was_given_to_other_content_is_noted_with_that(shared_memory: Path):
    """The copy of the first step arrives after the block was given away."""
    saving = Saving(shared_memory, num_host_blocks=1)
    saving.cache.release(computed(saving.cache, range(5)))
    early = saving.tiers.take_moves()
    second = computed(saving.cache, range(50, 55))
    late = saving.tiers.take_moves()
    saving.tiers.complete(early)
    assert not saving.in_file
    saving.tiers.complete(late)
    assert saving.in_file == hashes(second, 1)


def test_a_flush_gives_up_pending_copies(saving: Saving):
    computed(saving.cache, range(9))
    saving.cache.flush()
    assert saving.step() == ()
    assert not saving.in_file


@pytest.mark.parametrize("launched", [False, True])
def test_copies_of_other_engines_get_host_blocks_that_no_move_uses(shared_memory: Path, launched: bool):
    saving = Saving(shared_memory, num_host_blocks=3)
    computed(saving.cache, range(5))
    pending = {target for _, _, target in saving.tiers.pending}
    if launched:
        saving.tiers.take_moves()
    blocks = saving.tiers.reserve(3)
    assert len(blocks) == 2
    assert pending.isdisjoint(blocks)
    # The third one was looked at, and is free now.
    assert saving.tiers.pending == []


def test_a_copy_of_another_engine_is_found_on_the_host(saving: Saving):
    sequence, content = one(range(9)), Content
    chain = [saving.cache._finder._content(sequence, index) for index in range(2)]
    blocks = saving.tiers.reserve(2)
    for block, content in zip(blocks, chain, strict=True):
        saving.tiers.publish_copy(block, content, saving.file.sum(block))
        saving.tiers.host.release(block)
    saving.check()
    assert saving.in_file == {content.hash for content in chain}
    assert saving.cache.allocate([sequence]) == [sequence]
    assert sequence.num_computed == 8
    assert [move.kind for move in saving.step()] == [MoveKind.ONLOAD] * 2


def test_the_next_engine_begins_with_the_host_pool(saving: Saving, shared_memory: Path):
    sequence = computed(saving.cache, range(9))
    saving.step()
    saving.file.close()
    following = Saving(shared_memory)
    following.check()
    assert following.tiers.adopted == 2
    assert list(following.tiers.device.contents()) == []
    repeated = one(range(9))
    assert following.cache.allocate([repeated]) == [repeated]
    assert repeated.num_computed == 8
    assert following.in_file == hashes(sequence, 2)
