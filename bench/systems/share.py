"""A runner of which less is used."""

from typing import Any

from engine_worker.step import Runner
from sluice.settings.services import EngineSettings


class Share:
    """The runner, but for the size of its memories: what settings ask for, if it is less."""

    def __init__(self, runner: Runner, settings: EngineSettings) -> None:
        self._runner = runner
        tokens = settings.kv_cache_tokens
        self.num_blocks = min(
            runner.num_blocks, runner.num_blocks if tokens is None else tokens // runner.tokens_per_block
        )
        self.num_host_blocks = runner.num_host_blocks if settings.kv_host_memory else 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)
