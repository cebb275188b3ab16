"""Compares the KV cache manager's record of each block with the content of the scripted runner's cache."""

from itertools import pairwise

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.step import Content
from tests.fakes.runner import ScriptedRunner
from tests.fakes.scripted_cache import Slot
from tests.fakes.scripted_tokens import VOCAB, mix


class MemoryCheck:
    """Each block in the prefix cache, on the device and on the host, holds its tokens after one and the same prefix."""

    def __init__(self, cache: KvCacheManager, runner: ScriptedRunner) -> None:
        self._tiers = cache.tiers
        self._runner = runner
        self._digests: dict[bytes, int] = {}
        """Digest of all tokens up to the end of a block, by block hash."""

    def check(self) -> None:
        device, host = self._runner.kv_cache.blocks, self._runner.kv_cache.host_blocks
        moves = [*self._runner.moves_in_flight(), *self._tiers.pending]
        if moves:
            device, host = device.copy(), host.copy()
            for kind, source, target in moves:
                read = host if kind.from_host else device
                written = host if kind.to_host else device
                written[target] = read[source]
        for pool, blocks in ((self._tiers.device, device), (self._tiers.host, host)):
            for block, content in pool.contents():
                self._check_block(content, blocks[block])

    def _check_block(self, content: Content, slots: list[Slot]) -> None:
        assert None not in slots, f"{content} was never written: {slots}"
        # Table rows are stored as numbers >= VOCAB. A wrong row would change the outputs.
        pairs = zip(content.tokens, slots, strict=True)
        matches = all(token == stored if token < VOCAB else stored >= VOCAB for token, (stored, _) in pairs)
        assert matches, f"{content} is not {slots}"
        for (_, before), (token, digest) in pairwise(slots):
            assert digest == mix(before, token), f"{slots} mixes two sequences"
        digest = slots[-1][1]
        assert self._digests.setdefault(content.hash, digest) == digest, f"{content} follows another prefix"
