"""Statistics of engine steps and requests: python monitoring.py [--address HOST:PORT]."""

import argparse

from sluice.executor import GenerationExecutor, RequestStage, SamplingParams

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--address", help="address of a running server; default: start one")
args = parser.parse_args()

with GenerationExecutor.connect(args.address) if args.address else GenerationExecutor.create() as executor:
    results = [executor.generate_async(f"def f{i}(", SamplingParams(max_tokens=32)) for i in range(8)]
    for result in results:
        result.result()

    steps = executor.get_latest_iteration_stats(timeout=10)
    for step in steps[:5]:
        batch, cache = step.inflight_batching_stats, step.kv_cache_stats
        print(
            f"{step.engine_id} step {step.iter}: {step.iter_latency_ms:.1f} ms, "
            f"{batch.num_context_requests} requests in context phase, {batch.num_gen_requests} in generation phase, "
            f"{cache.used_num_blocks} of {cache.max_num_blocks} blocks"
        )
    print(f"{len(steps)} steps so far; the last one as JSON: {steps[-1].to_json_str()}")

    # Engines report twice a second: wait until all requests are reported as complete.
    missing = {result.request_id for result in results}
    while missing:
        for stats in executor.get_latest_request_stats(timeout=10):
            if stats.stage is RequestStage.GENERATION_COMPLETE and stats.id in missing:
                missing.discard(stats.id)
                print(
                    f"request {stats.id}: queued {stats.queued_seconds:.3f} s, {stats.num_prompt_tokens} prompt tokens "
                    f"({stats.num_cached_tokens} cached), {stats.num_generated_tokens} generated, "
                    f"{stats.alloc_new_blocks_per_request} blocks"
                )
