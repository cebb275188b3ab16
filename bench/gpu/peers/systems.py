"""Other systems: each loads the model into memory and serves prompts. Their packages are imported on use."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch

from bench.gpu.checks.parity import blank

DEVIATION = 0.02
"""Of nano-vllm's random weights."""
MEMORY_FRACTION = 0.85
"""Of the GPU, for vLLM."""
PAGE_TOKENS = 32
TIMEOUT_SECONDS = 60.0


class PeerOptions(NamedTuple):
    model: str
    """Folder without weights."""
    device: str
    batch: int
    """The largest."""
    tokens: int
    """Of a sequence, at most."""

    @property
    def dtype(self) -> str:
        """As everywhere in the run."""
        return "bfloat16" if self.device == "cuda" else "float32"


class PeerSystem(Protocol):
    """A system with its model in memory, with its own default settings."""

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        """Serve these at once, `max_tokens` each; returns how many tokens came."""
        ...

    def close(self) -> None:
        """End its processes."""
        ...


class Transformers:
    """Continuous batching."""

    def __init__(self, options: PeerOptions) -> None:
        from transformers import GenerationConfig, logging

        logging.set_verbosity_error()
        model = blank(options.model, torch.device(options.device), getattr(torch, options.dtype))
        # An EOS id that is never sampled: every output runs to max_tokens.
        model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        known = inspect.signature(model.init_continuous_batching).parameters
        given = {"continuous_batching_config": self._config(options)} if "continuous_batching_config" in known else {}
        self._manager = model.init_continuous_batching(generation_config=model.generation_config, **given)
        if options.device == "cuda" and hasattr(self._manager, "warmup"):
            self._manager.warmup()
        self._manager.start()

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        for prompt in prompts:
            self._manager.add_request(prompt, max_new_tokens=max_tokens)
        ended = tokens = 0
        while ended < len(prompts):
            result = self._manager.get_result(timeout=TIMEOUT_SECONDS)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if result.is_finished():
                ended += 1
                tokens += len(result.generated_tokens)
        return tokens

    def close(self) -> None:
        self._manager.stop(block=True, timeout=10)

    @staticmethod
    def _config(options: PeerOptions) -> Any:
        """Limited to the options that this version knows."""
        from transformers import ContinuousBatchingConfig

        wanted: dict[str, Any] = {
            "max_requests_per_batch": options.batch,
            "allow_block_sharing": False,
            # Without the package it would download a kernel.
            "auto_switch_to_flash": find_spec("flash_attn") is not None,
        }
        if options.device == "cpu":
            pages = options.batch * -(-options.tokens // PAGE_TOKENS)
            wanted |= {"page_size": PAGE_TOKENS, "num_blocks": 2 * pages, "max_batch_tokens": 2048}
        known = {entry.name for entry in fields(ContinuousBatchingConfig)}
        return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})


class Vllm:
    def __init__(self, options: PeerOptions) -> None:
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
        params = self._params(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        found = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(request.outputs[0].token_ids) for request in found)

    def close(self) -> None:
        """Its processes end with ours."""


class SgLang:
    def __init__(self, options: PeerOptions) -> None:
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
        params = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        found = self._engine.generate(input_ids=prompts, sampling_params=params)
        return sum(int(request["meta_info"]["completion_tokens"]) for request in found)

    def close(self) -> None:
        self._engine.shutdown()


class NanoVllm:
    """It has no random weights, so they are drawn here; and no greedy sampling: temperature 1."""

    def __init__(self, options: PeerOptions) -> None:
        nanovllm: Any = import_module("nanovllm")
        self._params = nanovllm.SamplingParams
        limits = {"max_model_len": options.tokens, "max_num_seqs": options.batch}
        self._llm = nanovllm.LLM(options.model, enforce_eager=False, **limits)
        with torch.no_grad():
            for weight in self._llm.model_runner.model.parameters():
                weight.normal_(0.0, DEVIATION)

    def run(self, prompts: list[list[int]], max_tokens: int) -> int:
        params = self._params(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        found = self._llm.generate(prompts, params, use_tqdm=False)
        return sum(len(request["token_ids"]) for request in found)

    def close(self) -> None:
        self._llm.exit()


class PeerKind(NamedTuple):
    name: str
    package: str
    load: Callable[[PeerOptions], PeerSystem]
    cpu: bool
    """Measured on a CPU too."""


PEERS: Mapping[str, PeerKind] = {
    kind.package: kind
    for kind in (
        PeerKind("transformers, continuous batching", "transformers", Transformers, cpu=True),
        PeerKind("vLLM", "vllm", Vllm, cpu=False),
        PeerKind("SGLang", "sglang", SgLang, cpu=False),
        PeerKind("nano-vllm", "nanovllm", NanoVllm, cpu=False),
    )
}
