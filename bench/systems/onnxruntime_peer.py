"""onnxruntime-genai's generator, with static batches. Imported in the peer's environment.

A batch is padded on the left and runs until its longest output ends. int8: weights in blocks, by the peer's builder.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from subprocess import run
from typing import Any

from bench.harness.load import PlannedRequest, Trace
from bench.peers.calls import Clock, Serving, in_groups, main

BUILDER = {"int8": ["-p", "int8", "--extra_options", "accuracy_level=4"], "float32": ["-p", "fp32"]}


def convert(source: Path, folder: Path, precision: str) -> None:
    builder = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    run([*builder, "-m", source, "-o", folder, "-e", "cpu", "-c", folder / "cache", *BUILDER[precision]], check=True)


def start(folder: Path, threads: int, _width: int) -> Serving:
    genai: Any = import_module("onnxruntime_genai")
    config = genai.Config(str(folder))
    options = {"intra_op_num_threads": threads}
    config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
    model = genai.Model(config)
    return lambda load, clock: in_groups(load, lambda requests: _generate(model, requests, clock))


def _generate(model: Any, requests: list[PlannedRequest], clock: Clock) -> list[Trace]:
    import numpy as np

    genai: Any = import_module("onnxruntime_genai")
    begun = clock()
    prompt, output = max(len(request.prompt) for request in requests), max(request.max_tokens for request in requests)
    params = genai.GeneratorParams(model)
    # A minimum length makes it ignore EOS.
    length = prompt + output
    params.set_search_options(batch_size=len(requests), max_length=length, min_length=length, do_sample=False)
    generator = genai.Generator(model, params)
    padded = [[0] * (prompt - len(request.prompt)) + request.prompt for request in requests]
    generator.append_tokens(np.array(padded, dtype=np.int32))
    steps: list[float] = []
    while len(steps) < output:
        generator.generate_next_token()
        steps.append(clock())
    rows = [generator.get_sequence(i)[prompt:].tolist() for i in range(len(requests))]
    counts = [request.max_tokens for request in requests]
    return [Trace(begun, steps[:n], [1] * n, row[:n]) for n, row in zip(counts, rows, strict=True)]


if __name__ == "__main__":
    main(convert, start)
