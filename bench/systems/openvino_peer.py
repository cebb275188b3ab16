"""OpenVINO GenAI's continuous batching with paged attention and prefix caching. Imported in the peer's environment.

int8: weights, by its converter; otherwise the runtime's defaults (8-bit KV cache, bfloat16 if the CPU supports it).
float32: weights, activations and KV cache.
"""

import sys
from importlib import import_module
from pathlib import Path
from subprocess import run
from typing import Any

from bench.harness.load import Feed, Load, Trace
from bench.peers.calls import Clock, Serving, main

CACHE_GIGABYTES = 2
STEP_TOKENS = 512
FLOAT32 = "float32"


def convert(source: Path, folder: Path, precision: str) -> None:
    form = "fp32" if precision == FLOAT32 else "int8"
    tool = Path(sys.executable).with_name("optimum-cli")
    task = ["--task", "text-generation-with-past", "--weight-format", form]
    run([tool, "export", "openvino", "--model", source, *task, folder], check=True)
    (folder / "precision").write_text(precision)


def start(folder: Path, threads: int, width: int) -> Serving:
    genai: Any = import_module("openvino_genai")
    scheduling = genai.SchedulerConfig()
    scheduling.cache_size = CACHE_GIGABYTES
    scheduling.max_num_seqs = width
    scheduling.max_num_batched_tokens = STEP_TOKENS
    scheduling.enable_prefix_caching = True
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if (folder / "precision").read_text() == FLOAT32:
        properties |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduling, "CPU", properties)
    return lambda load, clock: _serve(pipeline, load, clock)


def _serve(pipeline: Any, load: Load, clock: Clock) -> list[Trace]:
    import numpy as np

    ov: Any = import_module("openvino")
    genai: Any = import_module("openvino_genai")
    feed, traces, live = Feed(load), list[Trace](), dict[int, Any]()
    while len(traces) < len(load.requests) or live:
        for i in feed.due():
            request = load.requests[i]
            config = genai.GenerationConfig(max_new_tokens=request.max_tokens, ignore_eos=True, do_sample=False)
            traces.append(Trace(clock(), [], [], []))
            live[i] = pipeline.add_request(i, ov.Tensor(np.array([request.prompt], dtype=np.int64)), config)
        pipeline.step()
        now = clock()
        for i, handle in list(live.items()):
            if handle.can_read():
                tokens = [token for output in handle.read().values() for token in output.generated_ids]
                traces[i].arrivals.append(now)
                traces[i].counts.append(len(tokens))
                traces[i].tokens.extend(tokens)
            if len(traces[i].tokens) == load.requests[i].max_tokens:
                del live[i]
                feed.on_ended()
    return traces


if __name__ == "__main__":
    main(convert, start)
