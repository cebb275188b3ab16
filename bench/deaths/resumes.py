"""python -m bench.deaths.resumes: streams of a real model that the caller resumes, compared with undisturbed ones.

Each stream runs once undisturbed. Then its request is sent again with the first tokens, as clients without Sluice's own
do after the death of a router. No block is cached for it, so that these tokens are computed again. Prints a line for
each precision; exit status 1 if a stream differs.
"""

import argparse
import asyncio
import sys
import time
from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from bench.deaths import streams
from bench.deaths.precisions import PRECISIONS, model_of
from bench.deaths.requests import PROMPTS, StreamRequest
from sluice.client import Generation, Output, SluiceError

SAMPLING: Mapping[str, Mapping[str, Any]] = {"greedy": {"temperature": 0.0}, "temperature 1": {"temperature": 1.0}}


class ResumePlan(streams.StreamsPlan, frozen=True):
    """`streams`: undisturbed ones of each way of sampling. Each is resumed once at each position."""

    streams: int = 17
    max_tokens: int = 120
    positions: tuple[int, ...] = (20, 60, 100)
    at_once: int = 16
    routers: int = 1
    detokenizers: int = 1

    @property
    def requests(self) -> list[StreamRequest]:
        common = {"max_tokens": self.max_tokens, "ignore_eos": True, "token_ids": True, "logprobs": 0}
        return [
            StreamRequest(kind, f"# Exercise {i}\n{PROMPTS[i % len(PROMPTS)]}", {**common, **options, "seed": i})
            for i in range(self.streams)
            for kind, options in SAMPLING.items()
        ]


class Resumed(msgspec.Struct, frozen=True):
    kind: str
    position: int
    difference: str
    """What differs from the undisturbed stream, log-probabilities aside; empty if the two are equal."""
    other_logprobs: bool
    """Whether a log-probability has other bits."""


def measure(plan: ResumePlan, precision: str) -> list[Resumed]:
    with plan.ring(PRECISIONS[precision], model=model_of(precision)) as ring:
        return asyncio.run(_measure(plan, ring.addresses))


async def _measure(plan: ResumePlan, addresses: Sequence[str]) -> list[Resumed]:
    turns = asyncio.Semaphore(plan.at_once)
    async with streams.connect(addresses) as client:

        async def send(request: StreamRequest, **options: Any) -> Generation:
            async with turns:
                return await client.stream(request.prompt, **request.options, **options).collect()

        async def resume(request: StreamRequest, truth: Generation, position: int) -> Resumed:
            entry = {"index": 0, "token_ids": truth.outputs[0].token_ids[:position]}
            try:
                found = await send(request, resume=[entry], kv_cache={"salt": f"resumed at {position}"})
            except SluiceError as error:
                return Resumed(request.kind, position, f"{type(error).__name__}: {error}", other_logprobs=False)
            rest = [each.logprob for each in truth.outputs[0].logprobs[position:]]
            other_bits = [each.logprob for each in found.outputs[0].logprobs] != rest
            return Resumed(request.kind, position, difference(found, truth, position), other_bits)

        quiet = await asyncio.gather(*map(send, plan.requests))
        pairs = zip(plan.requests, quiet, strict=True)
        return await asyncio.gather(*(resume(*pair, position) for pair in pairs for position in plan.positions))


def difference(found: Generation, truth: Generation, position: int) -> str:
    """What differs between a stream resumed at `position` and the undisturbed one; empty if they are equal."""
    (output,), (whole,) = found.outputs, truth.outputs
    parts = {
        "token_ids": (output.token_ids, whole.token_ids[position:]),
        "text": (output.text, whole.text.removeprefix(text_before(whole, position))),
        "finish_reason": (output.finish_reason, whole.finish_reason),
        "completion_tokens": (found.usage.completion_tokens, truth.usage.completion_tokens),
    }
    different = (f"{name}: {a!r:.200} instead of {b!r:.200}" for name, (a, b) in parts.items() if a != b)
    return next(different, "")


def text_before(whole: Output, position: int) -> str:
    """The text of the first tokens, without a character that they only begin."""
    tokens = [each.token for each in whole.logprobs[:position] if not each.omitted]
    return getincrementaldecoder("utf-8")("replace").decode(b"".join(tokens))


def summary(precision: str, found: Sequence[Resumed]) -> str:
    counts = {each.kind: sum(other.kind == each.kind for other in found) for each in found}
    kinds = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    wrong, bits = sum(bool(each.difference) for each in found), sum(each.other_logprobs for each in found)
    return f"{precision}: {len(found)} streams ({kinds}) resumed: {wrong} differ, {bits} in bits of logprobs"


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.deaths.resumes", description=__doc__)
    default = ResumePlan()
    parser.add_argument("--precision", action="append", choices=list(PRECISIONS), help="default: int8 and int4")
    parser.add_argument("--streams", type=int, default=default.streams, help="undisturbed, of each way of sampling")
    parser.add_argument("--positions", type=int, nargs="+", default=default.positions, help="tokens before the resume")
    parser.add_argument("--threads", type=int, default=2, help="threads of all engines together")
    given = parser.parse_args(arguments)
    plan = ResumePlan(streams=given.streams, positions=tuple(given.positions), threads=given.threads)
    wrong = 0
    for precision in given.precision or ("int8", "int4"):
        began, found = time.monotonic(), measure(plan, precision)
        print(f"{summary(precision, found)} ({time.monotonic() - began:.0f} s)", flush=True)
        for each in found:
            if each.difference:
                print(f"  {each.kind}, at {each.position}: {each.difference}")
        wrong += sum(bool(each.difference) for each in found)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
