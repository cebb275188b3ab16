"""Streams text, in a thread and in an event loop: python streaming.py [--address HOST:PORT]."""

import argparse
import asyncio

from sluice.executor import GenerationExecutor, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", help="address of a running server; default: start one")
args = parser.parse_args()

params = SamplingParams(max_tokens=32, temperature=0)


def stream(executor: GenerationExecutor, prompt: str) -> None:
    print(prompt, end="", flush=True)
    for result in executor.generate_async(prompt, params, streaming=True):
        print(result.outputs[0].text_diff, end="", flush=True)
    print(f"\n--- {result.outputs[0].length} tokens, ended by {result.outputs[0].finish_reason}")


async def stream_two(executor: GenerationExecutor, prompt: str) -> None:
    sampled = SamplingParams(max_tokens=32, n=2, seed=1)
    async for result in executor.generate_async(prompt, sampled, streaming=True):
        new = [f"{output.index}: {output.text_diff!r}" for output in result.outputs if output.text_diff]
        if new:
            print("  ".join(new))


with GenerationExecutor.connect(args.address) if args.address else GenerationExecutor.create() as executor:
    stream(executor, "def fibonacci(n):")
    asyncio.run(stream_two(executor, "class "))
