"""Timeouts and aborts: python timeout_and_abort.py [--address HOST:PORT]."""

import argparse

from sluice.executor import GenerationExecutor, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", help="address of a running server; default: start one")
args = parser.parse_args()

endless = SamplingParams(max_tokens=None, ignore_eos=True)

with GenerationExecutor.connect(args.address) if args.address else GenerationExecutor.create() as executor:
    # A timeout ends the wait, not the request.
    result = executor.generate_async("import os\n", endless)
    try:
        result.result(timeout=0.01)
    except TimeoutError as error:
        print(error)
    result.abort()
    output = result.result(timeout=60).outputs[0]
    print(f"aborted: {result.aborted()}, ended by {output.finish_reason}")

    # A stream that is aborted after some tokens.
    result = executor.generate_async("class Stack:", endless, streaming=True)
    for _ in result:
        if result.outputs[0].length >= 8 and not result.aborted():
            result.abort()
    print(f"{result.outputs[0].finish_reason} after 8 tokens or a few more: {result.outputs[0].text[:40]!r}")

    # A time limit that the server enforces: the request ends without an error, with the text so far.
    result = executor.generate_async("def fibonacci(n):", endless, allotted_time_ms=200)
    print(f"ended by {result.result(timeout=60).outputs[0].finish_reason}")
