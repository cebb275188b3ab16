"""The transformers library on the same checkpoint: `generate` on padded batches, or its continuous batching.

python -m bench.systems.transformers_peer MODEL {generate,continuous} --threads N --width N
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from bench.harness.children import serve
from bench.harness.load import Ask, Feed, Load, Run, Trace

PAD = 0
PAGE_TOKENS = 32
CACHE_PAGES = 1024


class PaddedGenerate:
    """Groups of at most `width`, padded on the left; each runs as long as its longest output."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.inference_mode()
    def run(self, load: Load, clock: Callable[[], float]) -> list[Trace]:
        traces: list[Trace] = []
        for at in range(0, len(load.asks), load.width):
            traces += self._generate(load.asks[at : at + load.width], clock)
        return traces

    def close(self) -> None:
        pass

    def _generate(self, asks: Sequence[Ask], clock: Callable[[], float]) -> list[Trace]:
        begun = clock()
        longest = max(len(ask.prompt) for ask in asks)
        steps: list[float] = []

        def note_step(ids: torch.Tensor, _scores: Any, **_: Any) -> torch.Tensor:
            steps.append(clock())
            return torch.zeros(len(ids), dtype=torch.bool)

        out = self._model.generate(
            input_ids=torch.tensor([[PAD] * (longest - len(ask.prompt)) + ask.prompt for ask in asks]),
            attention_mask=torch.tensor([[0] * (longest - len(ask.prompt)) + [1] * len(ask.prompt) for ask in asks]),
            max_new_tokens=max(ask.max_tokens for ask in asks),
            stopping_criteria=[note_step],
        )
        wanted = [row[longest : longest + ask.max_tokens] for row, ask in zip(out.tolist(), asks, strict=True)]
        return [Trace(begun, steps[: len(ids)], [1] * len(ids), ids) for ids in wanted]


class ContinuousBatching:
    """The library's own scheduler over a paged cache, at most `width` requests at a time."""

    def __init__(self, model: Any, width: int) -> None:
        self._manager = model.init_continuous_batching(
            continuous_batching_config=ContinuousBatchingConfig(
                page_size=PAGE_TOKENS,
                num_blocks=CACHE_PAGES,
                max_batch_tokens=2048,
                max_requests_per_batch=width,
                allow_block_sharing=False,
            )
        )
        self._manager.start()

    def run(self, load: Load, clock: Callable[[], float]) -> list[Trace]:
        began = time.perf_counter() - clock()
        feed = Feed(load)
        submitted: dict[str, float] = {}
        results: dict[str, Any] = {}
        while len(results) < len(load.asks):
            for i in feed.due():
                submitted[self._submit(load.asks[i])] = clock()
            result = self._manager.get_result(timeout=60)
            if result is None or result.error is not None:
                raise RuntimeError(f"continuous batching failed: {result and result.error}")
            if result.is_finished():
                results[result.request_id] = result
                feed.on_ended()
        return [self._trace(at, results[name], began) for name, at in submitted.items()]

    def close(self) -> None:
        self._manager.stop(timeout=10)
        self._manager.destroy()

    def _submit(self, ask: Ask) -> str:
        return self._manager.add_request(ask.prompt, max_new_tokens=ask.max_tokens, record_timestamps=True)

    def _trace(self, submitted: float, result: Any, began: float) -> Trace:
        ids = result.generated_tokens
        return Trace(submitted, [at - began for at in result.timestamps], [1] * len(ids), ids)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("mode", choices=["generate", "continuous"])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--width", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    # An EOS id that is never sampled: every output runs to max_tokens.
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=PAD)
    peer = PaddedGenerate(model) if arguments.mode == "generate" else ContinuousBatching(model, arguments.width)

    def answer(load: Load) -> Run:
        began, cpu = time.perf_counter(), time.process_time()
        traces = peer.run(load, lambda: time.perf_counter() - began)
        seconds = time.perf_counter() - began
        return Run(seconds, {"transformers": time.process_time() - cpu}, traces)

    serve(answer, Load)
    peer.close()


if __name__ == "__main__":
    main()
