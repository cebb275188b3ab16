"""vLLM's offline engine."""

from importlib import import_module
from typing import Any

from bench.gpu.peers.options import Options

MEMORY_FRACTION = 0.85


class Vllm:
    """With the settings that it takes by itself."""

    def __init__(self, options: Options) -> None:
        vllm: Any = import_module("vllm")
        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            model=options.model,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=options.dtype,
            max_model_len=options.tokens,
            max_num_seqs=options.batch,
            gpu_memory_utilization=MEMORY_FRACTION,
        )

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        """See `Peer.run`."""
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self._llm.generate(asked, params, use_tqdm=False)
        return sum(len(request.outputs[0].token_ids) for request in found)

    def close(self) -> None:
        """Its processes end with ours."""


def load(options: Options) -> Vllm:
    """The model in memory."""
    return Vllm(options)
