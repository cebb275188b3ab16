"""Many prompts with a progress bar, results in order: python batch.py [--address HOST:PORT] [--prompts N]."""

import argparse

from sluice.executor import GenerationExecutor, RequestError, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", help="address of a running server; default: start one")
parser.add_argument("--prompts", type=int, default=64)
args = parser.parse_args()

prompts = [f"def method_{i}(self" for i in range(args.prompts)]

with GenerationExecutor.connect(args.address) if args.address else GenerationExecutor.create() as executor:
    results = executor.generate(prompts, SamplingParams(max_tokens=16, top_p=0.9, seed=1))
    for prompt, result in zip(prompts, results, strict=True):
        first_line = result.outputs[0].text.partition("\n")[0]
        print(f"{prompt}{first_line}")

    # One of the requests is invalid: its error names the field, and the executor remains usable.
    try:
        executor.generate(prompts[:3], [SamplingParams(), SamplingParams(temperature=9), SamplingParams()])
    except RequestError as error:
        print(error)
