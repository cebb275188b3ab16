"""python -m bench.gpu.peers.child PACKAGE: one peer, which reads its work from its arguments and writes a line of JSON
for each batch."""

import argparse
import json
import os
import time

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
MARK = "measured: "
"""Before each line of JSON: libraries print too."""
WARM_TOKENS = 4


def main() -> None:
    """Load, warm up at each batch, measure."""
    options = _options()
    os.environ.update(OFFLINE)
    from bench.gpu.core import random_prompts
    from bench.gpu.peers.catalog import ENTRIES
    from bench.gpu.peers.options import Options
    from bench.gpu.workload import Workload

    longest = options.prompt + options.output
    peer = ENTRIES[options.package].load(Options(options.model, options.device, max(options.batches), longest))
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
                raise RuntimeError(f"{tokens} tokens came, {batch * work.output_tokens} were asked for")
        print(MARK + json.dumps({"batch": batch, "seconds": min(found)}), flush=True)
    peer.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("package")
    parser.add_argument("--model", required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--vocab", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--output", type=int, required=True)
    parser.add_argument("--batches", type=int, nargs="+", required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
