"""SGLang's offline engine."""

from importlib import import_module
from typing import Any

from bench.gpu.peers.options import Options


class SgLang:
    """With the settings that it takes by itself."""

    def __init__(self, options: Options) -> None:
        sglang: Any = import_module("sglang")
        self._engine = sglang.Engine(
            model_path=options.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=options.dtype,
            context_length=options.tokens,
            max_running_requests=options.batch,
            log_level="error",
        )

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        """See `Peer.run`."""
        params = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        found = self._engine.generate(input_ids=prompts, sampling_params=params)
        return sum(int(request["meta_info"]["completion_tokens"]) for request in found)

    def close(self) -> None:
        """See `Peer.close`."""
        self._engine.shutdown()


def load(options: Options) -> SgLang:
    """The model in memory."""
    return SgLang(options)
