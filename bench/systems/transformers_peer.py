"""The transformers library on the same checkpoint: `generate` on padded batches, or its continuous batching.

python -m bench.systems.transformers_peer MODEL {generate,continuous} THREADS WIDTH
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.harness.children import serve
from bench.harness.load import Feed, Load, PlannedRequest, Run, Trace

PAD = 0
PAGE_TOKENS = 32
CACHE_PAGES = 1024


Clock = Callable[[], float]


@torch.inference_mode()
def generate(model: Any, requests: Sequence[PlannedRequest], clock: Clock) -> list[Trace]:
    """Generates for a static batch, padded on the left, until its longest output ends."""
    begun = clock()
    lengths = [len(request.prompt) for request in requests]
    longest = max(lengths)
    steps: list[float] = []

    def note_step(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
        steps.append(clock())
        return torch.zeros(len(ids), dtype=torch.bool)

    out = model.generate(
        input_ids=torch.tensor([[PAD] * (longest - len(request.prompt)) + request.prompt for request in requests]),
        attention_mask=torch.tensor(
            [[0] * (longest - len(request.prompt)) + [1] * len(request.prompt) for request in requests]
        ),
        max_new_tokens=max(request.max_tokens for request in requests),
        stopping_criteria=[note_step],
    )
    wanted = [row[longest : longest + request.max_tokens] for row, request in zip(out.tolist(), requests, strict=True)]
    return [Trace(begun, steps[: len(ids)], [1] * len(ids), ids) for ids in wanted]


def start_manager(model: Any, width: int) -> Any:
    """The library's scheduler over a paged cache, with at most `width` requests at a time."""
    config = ContinuousBatchingConfig(
        page_size=PAGE_TOKENS,
        num_blocks=CACHE_PAGES,
        max_batch_tokens=2048,
        max_requests_per_batch=width,
        allow_block_sharing=False,
    )
    manager = model.init_continuous_batching(continuous_batching_config=config)
    manager.start()
    return manager


def run_continuous(manager: Any, load: Load, clock: Clock) -> list[Trace]:
    began = time.perf_counter() - clock()
    feed = Feed(load)
    submitted: dict[str, float] = {}
    results: dict[str, Any] = {}
    while len(results) < len(load.requests):
        for request in (load.requests[i] for i in feed.due()):
            name = manager.add_request(request.prompt, max_new_tokens=request.max_tokens, record_timestamps=True)
            submitted[name] = clock()
        result = manager.get_result(timeout=60)
        if result is None or result.error is not None:
            raise RuntimeError(f"continuous batching failed: {result and result.error}")
        if result.is_finished():
            results[result.request_id] = result
            feed.on_ended()
    traces = []
    for name, at in submitted.items():
        ids = results[name].generated_tokens
        traces.append(Trace(at, [each - began for each in results[name].timestamps], [1] * len(ids), ids))
    return traces


def main() -> None:
    folder, mode, threads, width = sys.argv[1:]
    torch.set_num_threads(int(threads))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    # An EOS id that is never sampled: every output runs to max_tokens.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    manager = start_manager(model, int(width)) if mode == "continuous" else None

    def run(load: Load, clock: Clock) -> list[Trace]:
        if manager is not None:
            return run_continuous(manager, load, clock)
        groups = [load.requests[at : at + load.width] for at in range(0, len(load.requests), load.width)]
        return [trace for group in groups for trace in generate(model, group, clock)]

    def answer(load: Load) -> Run:
        began, cpu = time.perf_counter(), time.process_time()
        traces = run(load, lambda: time.perf_counter() - began)
        seconds = time.perf_counter() - began
        return Run(seconds, {"transformers": time.process_time() - cpu}, traces)

    serve(answer)
    if manager is not None:
        manager.stop(timeout=10)
        manager.destroy()


if __name__ == "__main__":
    main()
