"""nano-vllm."""

from importlib import import_module
from typing import Any

import torch

from bench.gpu.peers.options import Options

DEVIATION = 0.02


class NanoVllm:
    """It knows no random weights: what it leaves unwritten is drawn here. It cannot be greedy: temperature 1."""

    def __init__(self, options: Options) -> None:
        nanovllm: Any = import_module("nanovllm")
        self._params = nanovllm.SamplingParams
        limits = {"max_model_len": options.tokens, "max_num_seqs": options.batch}
        self._llm = nanovllm.LLM(options.model, enforce_eager=False, **limits)
        with torch.no_grad():
            for weight in self._llm.model_runner.model.parameters():
                weight.normal_(0.0, DEVIATION)

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        """See `Peer.run`."""
        params = self._params(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        found = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(request["token_ids"]) for request in found)

    def close(self) -> None:
        """See `Peer.close`."""
        self._llm.exit()


def load(options: Options) -> NanoVllm:
    """The model in memory."""
    return NanoVllm(options)
