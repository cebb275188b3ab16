"""Several requests from one event loop: python async_generate.py [--address HOST:PORT]."""

import argparse
import asyncio

from sluice.executor import GenerationExecutor, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", help="address of a running server; default: start one")
args = parser.parse_args()


async def complete(executor: GenerationExecutor, prompt: str) -> str:
    result = await executor.generate_async(prompt, SamplingParams(max_tokens=24, temperature=0))
    return f"{prompt}{result.outputs[0].text}"


async def main(executor: GenerationExecutor) -> None:
    prompts = ["import os\n", "class Stack:", "def fibonacci(n):", "for i in range("]
    for text in await asyncio.gather(*(complete(executor, prompt) for prompt in prompts)):
        print(f"{text}\n---")


with GenerationExecutor.connect(args.address) if args.address else GenerationExecutor.create() as executor:
    asyncio.run(main(executor))
