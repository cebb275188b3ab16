"""vLLM's engine in process, on the CPU, with chunked prompts and prefix caching. Imported in the peer's environment.

float32 and bfloat16: weights, activations and KV cache. It reads the checkpoint as it is, and compiles it when it
first starts.
"""

import os
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness.load import Feed, Load, Trace
from bench.peers.calls import Clock, Serving, main

CACHE_GIGABYTES = "1"
STEP_TOKENS = 512
PRECISION = "precision"
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": CACHE_GIGABYTES,
    # The operating system places the threads of every system that is measured.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def convert(source: Path, folder: Path, precision: str) -> None:
    for file in source.iterdir():
        (folder / file.name).symlink_to(file.resolve())
    (folder / PRECISION).write_text(precision)


def start(folder: Path, threads: int, width: int) -> Serving:
    # Set before vLLM is imported.
    os.environ.update(ENVIRONMENT, OMP_NUM_THREADS=str(threads), VLLM_CACHE_ROOT=str(folder / "compiled"))
    arguments = import_module("vllm.engine.arg_utils").EngineArgs(
        model=str(folder),
        dtype=(folder / PRECISION).read_text(),
        skip_tokenizer_init=True,
        max_num_seqs=width,
        max_num_batched_tokens=STEP_TOKENS,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    engine = import_module("vllm.v1.engine.llm_engine").LLMEngine.from_engine_args(arguments)
    return lambda load, clock: _serve(engine, load, clock)


def _serve(engine: Any, load: Load, clock: Clock) -> list[Trace]:
    vllm: Any = import_module("vllm")
    delta = import_module("vllm.sampling_params").RequestOutputKind.DELTA
    feed, traces = Feed(load), list[Trace]()
    while True:
        for i in feed.due():
            request = load.requests[i]
            params = vllm.SamplingParams(
                temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, output_kind=delta
            )
            traces.append(Trace(clock(), [], [], []))
            engine.add_request(str(i), {"prompt_token_ids": request.prompt}, params)
        if not engine.has_unfinished_requests():
            return traces
        outputs = engine.step()
        now = clock()
        for output in outputs:
            tokens = list(output.outputs[0].token_ids)
            trace = traces[int(output.request_id)]
            if tokens:
                trace.arrivals.append(now)
                trace.counts.append(len(tokens))
                trace.tokens.extend(tokens)
            feed.on_ended(output.finished)


if __name__ == "__main__":
    main(convert, start)
