"""transformers' continuous batching."""

import inspect
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

import torch

from bench.gpu.peers.options import Options
from bench.gpu.twin import blank

PAGE_TOKENS = 32
PATIENCE = 60.0


class ContinuousBatching:
    """The library's own manager, with the attention that it takes by itself."""

    def __init__(self, options: Options) -> None:
        from transformers import GenerationConfig, logging

        logging.set_verbosity_error()
        model = blank(options.model, torch.device(options.device), getattr(torch, options.dtype))
        # An end of sequence that never comes: outputs are as long as they are asked to be.
        model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        known = inspect.signature(model.init_continuous_batching).parameters
        given = {"continuous_batching_config": _config(options)} if "continuous_batching_config" in known else {}
        self._manager = model.init_continuous_batching(generation_config=model.generation_config, **given)
        if options.device == "cuda" and hasattr(self._manager, "warmup"):
            self._manager.warmup()
        self._manager.start()

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        """See `Peer.run`."""
        for prompt in prompts:
            self._manager.add_request(prompt, max_new_tokens=max_tokens)
        ended = tokens = 0
        while ended < len(prompts):
            result = self._manager.get_result(timeout=PATIENCE)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if result.is_finished():
                ended += 1
                tokens += len(result.generated_tokens)
        return tokens

    def close(self) -> None:
        """See `Peer.close`."""
        self._manager.stop(block=True, timeout=10)


def load(options: Options) -> ContinuousBatching:
    """The model in memory."""
    return ContinuousBatching(options)


def _config(options: Options) -> Any:
    """As far as this version has these options."""
    from transformers import ContinuousBatchingConfig

    wanted: dict[str, Any] = {
        "max_requests_per_batch": options.batch,
        "allow_block_sharing": False,
        # Without the package it would look for a kernel in the network.
        "auto_switch_to_flash": find_spec("flash_attn") is not None,
    }
    if options.device == "cpu":
        pages = options.batch * -(-options.tokens // PAGE_TOKENS)
        wanted |= {"page_size": PAGE_TOKENS, "num_blocks": 2 * pages, "max_batch_tokens": 2048}
    known = {entry.name for entry in fields(ContinuousBatchingConfig)}
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})
