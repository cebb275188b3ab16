"""Other systems on the same shape with random weights, each in a separate process. Their packages are imported on use.

python -m bench.gpu.peers WORK: measures one system and reports the seconds of each batch.
"""

import inspect
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from bench.gpu.checks import blank
from bench.gpu.children import Children, read_work, report
from bench.gpu.engine import random_prompts
from bench.gpu.findings import Skip, Throughput
from bench.gpu.shapes import Shape, Workload

DEVIATION = 0.02
MEMORY_FRACTION = 0.85
PAGE_TOKENS = 32
TIMEOUT_SECONDS = 60.0
WARM_TOKENS = 4


class PeerOptions(NamedTuple):
    model: str
    device: str
    batch: int
    tokens: int
    """Maximum length of a sequence."""

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def limits(self) -> dict[str, int]:
        """Options of vLLM and nano-vllm."""
        return {"max_model_len": self.tokens, "max_num_seqs": self.batch}


RANDOM: Mapping[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
"""Options of vLLM and SGLang: random weights, no text."""


class PeerSystem(NamedTuple):
    run: Callable[[list[list[int]], int], int]
    """Serves these prompts together, with the given number of output tokens each; returns the number generated."""
    close: Callable[[], object]


def load_transformers(options: PeerOptions) -> PeerSystem:
    from transformers import GenerationConfig, logging

    logging.set_verbosity_error()
    model = blank(options.model, torch.device(options.device), getattr(torch, options.dtype))
    # An EOS id that is never sampled: every output runs to max_tokens.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    known = inspect.signature(model.init_continuous_batching).parameters
    given = {"continuous_batching_config": _config(options)} if "continuous_batching_config" in known else {}
    manager = model.init_continuous_batching(generation_config=model.generation_config, **given)
    if options.device == "cuda" and hasattr(manager, "warmup"):
        manager.warmup()
    manager.start()

    def run(prompts: list[list[int]], max_tokens: int) -> int:
        for prompt in prompts:
            manager.add_request(prompt, max_new_tokens=max_tokens)
        ended = tokens = 0
        while ended < len(prompts):
            result = manager.get_result(timeout=TIMEOUT_SECONDS)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if result.is_finished():
                ended += 1
                tokens += len(result.generated_tokens)
        return tokens

    return PeerSystem(run, lambda: manager.stop(block=True, timeout=10))


def _config(options: PeerOptions) -> Any:
    """Limited to the options that this version of transformers knows."""
    from transformers import ContinuousBatchingConfig

    wanted: dict[str, Any] = {
        "max_requests_per_batch": options.batch,
        "allow_block_sharing": False,
        # Without the package, transformers would download a kernel.
        "auto_switch_to_flash": find_spec("flash_attn") is not None,
    }
    if options.device == "cpu":
        pages = options.batch * -(-options.tokens // PAGE_TOKENS)
        wanted |= {"page_size": PAGE_TOKENS, "num_blocks": 2 * pages, "max_batch_tokens": 2048}
    known = {entry.name for entry in fields(ContinuousBatchingConfig)}
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})


def load_vllm(options: PeerOptions) -> PeerSystem:
    vllm: Any = import_module("vllm")
    memory = {"gpu_memory_utilization": MEMORY_FRACTION}
    llm = vllm.LLM(model=options.model, dtype=options.dtype, **RANDOM, **options.limits, **memory)

    def run(prompts: list[list[int]], max_tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(request.outputs[0].token_ids) for request in found)

    # vLLM's processes end with this one.
    return PeerSystem(run, lambda: None)


def load_sglang(options: PeerOptions) -> PeerSystem:
    sglang: Any = import_module("sglang")
    limits = {"context_length": options.tokens, "max_running_requests": options.batch}
    engine = sglang.Engine(model_path=options.model, dtype=options.dtype, log_level="error", **RANDOM, **limits)

    def run(prompts: list[list[int]], max_tokens: int) -> int:
        params = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=params)
        return sum(int(request["meta_info"]["completion_tokens"]) for request in found)

    return PeerSystem(run, engine.shutdown)


def load_nanovllm(options: PeerOptions) -> PeerSystem:
    nanovllm: Any = import_module("nanovllm")
    llm = nanovllm.LLM(options.model, enforce_eager=False, **options.limits)
    # nano-vllm has no option for random weights.
    with torch.no_grad():
        for weight in llm.model_runner.model.parameters():
            weight.normal_(0.0, DEVIATION)

    def run(prompts: list[list[int]], max_tokens: int) -> int:
        # nano-vllm has no greedy sampling.
        params = nanovllm.SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        found = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(request["token_ids"]) for request in found)

    return PeerSystem(run, llm.exit)


class PeerKind(NamedTuple):
    name: str
    package: str
    load: Callable[[PeerOptions], PeerSystem]
    cpu: bool = False


KINDS = (
    PeerKind("transformers, continuous batching", "transformers", load_transformers, cpu=True),
    PeerKind("vLLM", "vllm", load_vllm),
    PeerKind("SGLang", "sglang", load_sglang),
    PeerKind("nano-vllm", "nanovllm", load_nanovllm),
)
PEERS: Mapping[str, PeerKind] = {kind.package: kind for kind in KINDS}


def measure_peer(
    kind: PeerKind,
    shape: Shape,
    works: Sequence[Workload],
    device: torch.device,
    children: Children,
    seconds: float,
) -> tuple[list[Throughput], str]:
    """Results within `seconds`, and why some are missing. Raises Skip if the package is missing or needs a GPU."""
    if find_spec(kind.package) is None:
        raise Skip("not installed")
    if device.type == "cpu" and not kind.cpu:
        raise Skip("not measured on a CPU")
    longest = max(work.prompt_tokens + work.output_tokens for work in works)
    options = PeerOptions(str(shape.write(children.folder)), device.type, max(work.batch for work in works), longest)
    request = {"package": kind.package, "options": options, "vocab_size": shape.vocab_size, "works": works}
    reports, why = children.run_module([__name__, json.dumps(request)], seconds)
    times = {one["batch"]: one["seconds"] for one in reports}
    return [work.result(kind.name, shape.name, times[work.batch]) for work in works if work.batch in times], why


def main() -> None:
    request = read_work()
    peer = PEERS[request["package"]].load(PeerOptions(*request["options"]))
    vocab_size = request["vocab_size"]
    for work in (Workload(*sizes) for sizes in request["works"]):
        peer.run(random_prompts(work.batch, work.prompt_tokens, vocab_size, seed=work.batch), WARM_TOKENS)
        report(batch=work.batch, seconds=min(_seconds(peer, work, vocab_size, seed) for seed in work.seeds))
    peer.close()


def _seconds(peer: PeerSystem, work: Workload, vocab_size: int, seed: int) -> float:
    prompts = random_prompts(work.batch, work.prompt_tokens, vocab_size, seed)
    began = time.perf_counter()
    tokens = peer.run(prompts, work.output_tokens)
    seconds = time.perf_counter() - began
    if tokens != work.tokens:
        raise RuntimeError(f"{tokens} tokens were generated instead of {work.tokens}")
    return seconds


if __name__ == "__main__":
    main()
