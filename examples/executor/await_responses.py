"""Responses of several requests in order of arrival: python await_responses.py [--address HOST:PORT]."""

import argparse

from sluice.executor import GenerationExecutor, GenerationRequest, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", help="address of a running server; default: start one")
args = parser.parse_args()

params = SamplingParams(max_tokens=12, n=2, seed=1)

with GenerationExecutor.connect(args.address) if args.address else GenerationExecutor.create() as executor:
    requests = [
        GenerationRequest(prompt, params, streaming=True, client_id=100 + i)
        for i, prompt in enumerate(["import ", "class ", "def "])
    ]
    tokens = {request_id: [[], []] for request_id in executor.enqueue_requests(requests)}
    final = 0
    while final < len(requests):
        for response in executor.await_responses(timeout=60):
            if response.has_error():
                raise SystemExit(response.error_msg)
            result = response.result
            tokens[response.request_id][result.sequence_index] += result.output_token_ids[0]
            if result.is_sequence_final:
                count = len(tokens[response.request_id][result.sequence_index])
                print(f"client {response.client_id}, sequence {result.sequence_index}: {count} tokens")
            final += result.is_final
