"""Other systems, each measured in its own process. Their packages are imported on use."""

import inspect
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.gpu.checks.parity import blank
from bench.gpu.children import Children
from bench.gpu.findings import Skip, Throughput
from bench.gpu.peers import MARK
from bench.gpu.shapes import Shape, Workload

DEVIATION = 0.02
MEMORY_FRACTION = 0.85
PAGE_TOKENS = 32
TIMEOUT_SECONDS = 60.0


class PeerOptions(NamedTuple):
    model: str
    device: str
    batch: int
    tokens: int
    """Of a sequence, at most."""

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.device == "cuda" else "float32"


class PeerSystem(NamedTuple):
    run: Callable[[list[list[int]], int], int]
    """Serves these prompts at once, so many tokens each; returns how many tokens came."""
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
        # Without the package it would download a kernel.
        "auto_switch_to_flash": find_spec("flash_attn") is not None,
    }
    if options.device == "cpu":
        pages = options.batch * -(-options.tokens // PAGE_TOKENS)
        wanted |= {"page_size": PAGE_TOKENS, "num_blocks": 2 * pages, "max_batch_tokens": 2048}
    known = {entry.name for entry in fields(ContinuousBatchingConfig)}
    return ContinuousBatchingConfig(**{name: value for name, value in wanted.items() if name in known})


def load_vllm(options: PeerOptions) -> PeerSystem:
    vllm: Any = import_module("vllm")
    llm = vllm.LLM(
        model=options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        max_model_len=options.tokens,
        max_num_seqs=options.batch,
        gpu_memory_utilization=MEMORY_FRACTION,
    )

    def run(prompts: list[list[int]], max_tokens: int) -> int:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
        found = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(request.outputs[0].token_ids) for request in found)

    # Its processes end with ours.
    return PeerSystem(run, lambda: None)


def load_sglang(options: PeerOptions) -> PeerSystem:
    sglang: Any = import_module("sglang")
    engine = sglang.Engine(
        model_path=options.model,
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype=options.dtype,
        context_length=options.tokens,
        max_running_requests=options.batch,
        log_level="error",
    )

    def run(prompts: list[list[int]], max_tokens: int) -> int:
        params = {"temperature": 0.0, "max_new_tokens": max_tokens, "ignore_eos": True}
        found = engine.generate(input_ids=prompts, sampling_params=params)
        return sum(int(request["meta_info"]["completion_tokens"]) for request in found)

    return PeerSystem(run, engine.shutdown)


def load_nanovllm(options: PeerOptions) -> PeerSystem:
    nanovllm: Any = import_module("nanovllm")
    limits = {"max_model_len": options.tokens, "max_num_seqs": options.batch}
    llm = nanovllm.LLM(options.model, enforce_eager=False, **limits)
    # It has no random weights.
    with torch.no_grad():
        for weight in llm.model_runner.model.parameters():
            weight.normal_(0.0, DEVIATION)

    def run(prompts: list[list[int]], max_tokens: int) -> int:
        # It has no greedy sampling.
        params = nanovllm.SamplingParams(temperature=1.0, max_tokens=max_tokens, ignore_eos=True)
        found = llm.generate(prompts, params, use_tqdm=False)
        return sum(len(request["token_ids"]) for request in found)

    return PeerSystem(run, llm.exit)


class PeerKind(NamedTuple):
    name: str
    package: str
    load: Callable[[PeerOptions], PeerSystem]
    cpu: bool


PEERS: Mapping[str, PeerKind] = {
    kind.package: kind
    for kind in (
        PeerKind("transformers, continuous batching", "transformers", load_transformers, cpu=True),
        PeerKind("vLLM", "vllm", load_vllm, cpu=False),
        PeerKind("SGLang", "sglang", load_sglang, cpu=False),
        PeerKind("nano-vllm", "nanovllm", load_nanovllm, cpu=False),
    )
}


def measure_peer(
    kind: PeerKind,
    shape: Shape,
    folder: Path,
    device: torch.device,
    works: Sequence[Workload],
    children: Children,
    seconds: float,
) -> tuple[list[Throughput], str]:
    """Results within `seconds`, and why some are missing. Raises Skip if it is not installed or not meant for this
    device."""
    if find_spec(kind.package) is None:
        raise Skip("not installed")
    if device.type == "cpu" and not kind.cpu:
        raise Skip("not asked on a CPU")
    command = _command(kind, shape, folder, device, works)
    output, why = children.run(command, folder / f"{kind.package}.log", seconds)
    lines = [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]
    times = {line["batch"]: line["seconds"] for line in lines}
    return [work.result(kind.name, shape.name, times[work.batch]) for work in works if work.batch in times], why


def _command(kind: PeerKind, shape: Shape, folder: Path, device: torch.device, works: Sequence[Workload]) -> list[str]:
    largest = max(works, key=lambda work: work.prompt_tokens + work.output_tokens)
    values = {
        "model": shape.write(folder),
        "device": device.type,
        "vocab": shape.vocab_size,
        "prompt": largest.prompt_tokens,
        "output": largest.output_tokens,
    }
    flags = [part for name, value in values.items() for part in (f"--{name}", str(value))]
    batches = [str(work.batch) for work in works]
    return [sys.executable, "-m", "bench.gpu.peers.child", kind.package, *flags, "--batches", *batches]
