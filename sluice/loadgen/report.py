"""The figures of a run, under the names that `vllm bench serve` gives them in its JSON files."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from sluice.loadgen.outcome import Outcome
from sluice.loadgen.run import Measured

METRICS = ("ttft", "tpot", "itl", "e2el")
"""Time to first token, time per output token after it, inter-token latency (between chunks), end-to-end latency."""
GOALS = ("ttft", "tpot", "e2el")
"""Those that goodput may set a limit for, in milliseconds: each request has one of each."""


def summarize(rounds: Sequence[Measured], percentiles: Sequence[float], goals: Mapping[str, float]) -> dict[str, Any]:
    """Of one server, over all of its rounds."""
    measured = Measured.joined(rounds)
    good = [each for each in measured.outcomes if each.succeeded]
    seconds, prompt, output = measured.seconds, sum(o.prompt_tokens for o in good), sum(o.output_tokens for o in good)
    met = sum(_meets(each, goals) for each in good)
    figures: dict[str, Any] = {
        "duration": seconds,
        "completed": len(good),
        "failed": len(measured.outcomes) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": _per_second(len(good), seconds),
        "request_goodput": _per_second(met, seconds) if goals else None,
        "output_throughput": _per_second(output, seconds),
        "output_throughput_of_rounds": [_output_throughput(each) for each in rounds],
        "total_token_throughput": _per_second(prompt + output, seconds),
        "max_output_tokens_per_s": _most_tokens_in_a_second(good),
        "max_concurrent_requests": _most_at_once(good),
    }
    for name, samples in _samples(good).items():
        figures |= _statistics(name, samples, percentiles)
    return figures


def _output_throughput(measured: Measured) -> float:
    return _per_second(sum(o.output_tokens for o in measured.outcomes if o.succeeded), measured.seconds)


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One entry per request."""
    return {
        "input_lens": [each.prompt_tokens for each in outcomes],
        "output_lens": [each.output_tokens if each.succeeded else 0 for each in outcomes],
        "ttfts": [each.first_token for each in outcomes],
        "itls": [each.gaps for each in outcomes],
        "latencies": [each.latency for each in outcomes],
        "start_times": [each.start for each in outcomes],
        "queue_times": [each.queued for each in outcomes],
        "generated_texts": [each.text for each in outcomes],
        "errors": [each.error for each in outcomes],
    }


def percentile(samples: Sequence[float], percent: float) -> float:
    """With linear interpolation, as numpy.percentile computes it; 0 without samples."""
    if not len(samples):
        return 0.0
    ordered = sorted(samples)
    place = (len(ordered) - 1) * percent / 100
    low, high = math.floor(place), math.ceil(place)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentile_name(percent: float) -> str:
    return f"p{percent:g}"


def _samples(good: Sequence[Outcome]) -> dict[str, list[float]]:
    """In seconds."""
    return {
        "ttft": [each.first_token for each in good if each.arrivals],
        "tpot": [each.per_token for each in good if each.output_tokens > 1],
        "itl": [gap for each in good for gap in each.gaps],
        "e2el": [each.latency for each in good],
    }


def _statistics(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> dict[str, float]:
    samples = [1000 * each for each in seconds]
    return {
        f"mean_{name}_ms": statistics.fmean(samples) if samples else 0.0,
        f"median_{name}_ms": percentile(samples, 50),
        f"std_{name}_ms": statistics.pstdev(samples) if samples else 0.0,
    } | {f"{percentile_name(each)}_{name}_ms": percentile(samples, each) for each in percentiles}


def _meets(outcome: Outcome, goals: Mapping[str, float]) -> bool:
    found = {"ttft": outcome.first_token, "tpot": outcome.per_token, "e2el": outcome.latency}
    return all(1000 * found[name] <= limit for name, limit in goals.items())


def _per_second(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def _most_tokens_in_a_second(good: Sequence[Outcome]) -> float:
    if not good:
        return 0.0
    began = min(each.start for each in good)
    counts: dict[int, int] = {}
    for each in good:
        for at, tokens in zip(each.arrivals, each.tokens, strict=True):
            counts[int(at - began)] = counts.get(int(at - began), 0) + tokens
    return float(max(counts.values(), default=0))


def _most_at_once(good: Sequence[Outcome]) -> int:
    # One that ends as another begins was not in flight beside it.
    changes = sorted([(each.start, 1) for each in good] + [(each.end, -1) for each in good])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most
