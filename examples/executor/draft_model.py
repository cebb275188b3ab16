"""Speculative decoding with a draft model: python draft_model.py [--address HOST:PORT | --draft-model FOLDER]."""

import argparse

from sluice import tiny_model
from sluice.executor import GenerationExecutor, RequestStage, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", help="address of a running server; default: start one, with a draft model")
parser.add_argument("--draft-model", default=str(tiny_model.path()), help="default: the model itself")
args = parser.parse_args()

prompts = ["import os\n", "class Stack:\n"]


def start() -> GenerationExecutor:
    if args.address:
        return GenerationExecutor.connect(args.address)
    return GenerationExecutor.create(draft_model=args.draft_model)


with start() as executor:
    params = SamplingParams(max_tokens=48, seed=1)
    plain = executor.generate(prompts, params, max_draft_tokens=0)
    drafted = executor.generate(prompts, params, max_draft_tokens=4)
    for without, with_drafts in zip(plain, drafted, strict=True):
        print("the same text:", without.outputs[0].text == with_drafts.outputs[0].text)

    # Engines report twice a second: wait until both requests are reported as complete.
    missing = {result.request_id for result in drafted}
    while missing:
        for stats in executor.get_latest_request_stats(timeout=10):
            if stats.stage is RequestStage.GENERATION_COMPLETE and stats.id in missing:
                missing.discard(stats.id)
                accepted, count = stats.num_accepted_draft_tokens, stats.num_draft_tokens
                print(f"request {stats.id}: {accepted} of {count} drafted tokens were accepted")
