"""Computes steps: tensors in, the model, sampling, plain data out."""

import torch

from engine_worker.attention.backend import AttentionBackend
from engine_worker.attention.cache import KVCache
from engine_worker.models.decoder import CausalLM
from engine_worker.models.windows import widest
from engine_worker.runner import batch
from engine_worker.sampling.sampler import sample
from engine_worker.step import Drawn, Step


class ModelRunner:
    """A model, its KV cache and an attention backend; see `engine_worker.step.Runner`."""

    def __init__(self, model: CausalLM, cache: KVCache, backend: AttentionBackend, device: torch.device) -> None:
        self.num_blocks = cache.num_blocks
        self.num_host_blocks = cache.num_host_blocks
        self.tokens_per_block = cache.tokens_per_block
        self.window = widest(model.config.windows)
        dtype = str(cache.layers[0].keys.dtype).removeprefix("torch.")
        self.choices = {"device": str(device), "dtype": dtype, "attention": backend.name}
        self._model = model
        self._cache = cache
        self._backend = backend
        self._device = device

    @torch.inference_mode()
    def run(self, step: Step) -> list[Drawn]:
        """See `Runner.run`."""
        self._cache.move(step.moves)
        if not step.slices:
            return []
        work = batch.build(step.slices, self.tokens_per_block, self.window, self._device)
        inputs = self._backend.prepare(work.attention, self._cache)
        hidden = self._model(work.token_ids, work.positions, self._cache, inputs)
        if not work.draws:
            return []
        rows = hidden if work.last_tokens is None else hidden.index_select(0, work.last_tokens)
        return sample(self._model.logits(rows), work.draw_rows, work.draws)
