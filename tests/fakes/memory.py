"""What the KV cache's books say about the blocks, compared with what lies in the scripted runner's memory."""

from itertools import pairwise

from engine_worker.kvcache.cache import KvCacheManager
from engine_worker.step import MoveKind
from tests.fakes.runner import VOCAB, ScriptedRunner, mix


class MemoryCheck:
    """Every findable block, on the device and on the host, holds its tokens, after the same others as always."""

    def __init__(self, cache: KvCacheManager, runner: ScriptedRunner) -> None:
        self._tiers = cache.tiers
        self._runner = runner
        self._digests: dict[bytes, int] = {}
        """Of all tokens up to the end of a block, by its hash."""

    def check(self) -> None:
        device, host = self._runner.blocks, self._runner.host_blocks
        moves = [*self._runner.moves_in_flight(), *self._tiers.moves]
        if moves:
            device, host = device.copy(), host.copy()
            for kind, source, target in moves:
                read = host if kind is MoveKind.ONLOAD else device
                written = host if kind is MoveKind.OFFLOAD else device
                written[target] = read[source]
        for pool, blocks in ((self._tiers.device, device), (self._tiers.host, host)):
            for block, content in pool.contents():
                self._check_block(content, blocks[block])

    def _check_block(self, content, slots) -> None:
        assert None not in slots, f"{content} was never written: {slots}"
        # Rows of tables are numbers behind the vocabulary; which ones, the outputs show.
        held = zip(content.tokens, slots, strict=True)
        alike = all(token == found if token < VOCAB else found >= VOCAB for token, (found, _) in held)
        assert alike, f"{content} is not {slots}"
        for (_, before), (token, digest) in pairwise(slots):
            assert digest == mix(before, token), f"{slots} comes from two sequences"
        digest = slots[-1][1]
        assert self._digests.setdefault(content.hash, digest) == digest, f"{content} after other tokens"
