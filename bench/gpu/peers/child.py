"""python -m bench.gpu.peers.child PACKAGE: measures one peer and prints a line of JSON for each batch."""

import argparse
import json
import os
import time

from bench.gpu.peers import MARK

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
WARM_TOKENS = 4


def main() -> None:
    options = _options()
    os.environ.update(OFFLINE)
    # Libraries read the environment when they are imported.
    from bench.gpu.engine import random_prompts
    from bench.gpu.peers.systems import PEERS, PeerOptions
    from bench.gpu.shapes import Workload

    longest = options.prompt + options.output
    peer = PEERS[options.package].load(PeerOptions(options.model, options.device, max(options.batches), longest))
    for batch in options.batches:
        work = Workload(batch, options.prompt, options.output)
        peer.run(random_prompts(batch, work.prompt_tokens, options.vocab, seed=batch), WARM_TOKENS)
        found = []
        for seed in work.seeds:
            prompts = random_prompts(batch, work.prompt_tokens, options.vocab, seed)
            began = time.perf_counter()
            tokens = peer.run(prompts, work.output_tokens)
            found.append(time.perf_counter() - began)
            if tokens != batch * work.output_tokens:
                raise RuntimeError(f"{tokens} tokens came instead of {batch * work.output_tokens}")
        print(MARK + json.dumps({"batch": batch, "seconds": min(found)}), flush=True)
    peer.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    for name, kind in (("model", str), ("device", str), ("vocab", int), ("prompt", int), ("output", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
