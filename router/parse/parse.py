"""Parses a sluice.v1.GenerationSpec into a `Spec`, with every field set and in range."""

import os
import re
import time

from router.errors import Reason, Violations, shown
from router.parse.beams import parse_beams
from router.parse.model import Began, Limits, ServedModel
from router.parse.prompt import parse_prompt
from router.parse.resume import parse_began, parse_resume
from router.parse.sampling import (
    Stopping,
    parse_count,
    parse_sampling,
    parse_stopping,
    parse_strings,
)
from router.parse.spec import Spec
from sluice.v1 import generation_pb2 as pb
from sluice.wire.params import Range, TextParams

UNARY_INTERVAL = 128
"""Tokens per text batch of a unary request. A failed attempt loses fewer tokens than this."""
ENGINE_DEATHS_RANGE = Range(0, 8)
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


def parse(spec: pb.GenerationSpec, model: ServedModel, limits: Limits, streaming: bool, bad: Violations) -> Spec:
    """The spec, which must not be used if `bad` has violations."""
    began = parse_began(spec.resume, bad) if spec.resume else Began()
    stopping = parse_stopping(spec.stopping, model, limits, bad)
    num_outputs, n = _n(spec, limits, streaming, bad)
    logprobs = _logprobs(spec.output, model, limits, bad)
    # Outputs are ranked by their logprobs, even if logprobs are not returned.
    sampled_logprobs = 0 if logprobs is None and num_outputs < n else logprobs
    sampling = parse_sampling(spec.sampling, sampled_logprobs, model, limits, bad)
    if spec.sampling.HasField("beam_search"):
        sampling = parse_beams(spec, sampling, n, bad)
    parsed = Spec(
        n=n,
        num_outputs=num_outputs,
        logprobs=logprobs,
        sampling=sampling,
        stopping=stopping,
        resume=parse_resume(spec, n, sampling.greedy, stopping, model, bad) if spec.resume else {},
        resume_model=began.model,
        request_id=parse_request_id(spec.request_id, bad),
        prompt=parse_prompt(spec, model, limits, bad),
        keep_prompt_tokens=_keep_prompt_tokens(spec, bad),
        text=_text_params(spec.output, stopping, model, limits, streaming, bad),
        priority=_priority(spec.priority, bad),
        salt=spec.kv_cache.salt,
        time_limit=_time_limit(spec, limits, bad),
        token_ids=spec.output.token_ids,
        echo=spec.output.echo,
        prompt_tail=_prompt_tail(spec.output, limits, bad),
        timings=spec.output.timings,
        streaming=streaming,
        engine_deaths=spec.engine_deaths,
        client_id=spec.client_id if spec.HasField("client_id") else None,
    )
    bad.at_most("spec.kv_cache.salt", len(parsed.salt.encode()), limits.salt_bytes, "bytes")
    bad.within("spec.engine_deaths", parsed.engine_deaths, ENGINE_DEATHS_RANGE)
    return parsed


def _logprobs(output: pb.OutputOptions, model: ServedModel, limits: Limits, bad: Violations) -> int | None:
    if not output.HasField("logprobs"):
        return None
    return parse_count("spec.output.logprobs", output.logprobs, model, limits, bad)


def _keep_prompt_tokens(spec: pb.GenerationSpec, bad: Violations) -> int | None:
    if not spec.HasField("truncate_prompt_tokens"):
        return None
    if spec.truncate_prompt_tokens == 0:
        bad.add("spec.truncate_prompt_tokens", "is 0, must be at least 1", reason=Reason.OUT_OF_RANGE)
    return spec.truncate_prompt_tokens


def _text_params(
    output: pb.OutputOptions, stopping: Stopping, model: ServedModel, limits: Limits, streaming: bool, bad: Violations
) -> TextParams:
    field, kept = "spec.output.keep_special_tokens", output.keep_special_tokens
    interval = output.stream_interval if output.HasField("stream_interval") else 1
    if interval == 0:
        bad.add("spec.output.stream_interval", "is 0, must be at least 1", reason=Reason.OUT_OF_RANGE)
    return TextParams(
        stop=stopping.strings,
        include_stop=stopping.include_stop,
        min_tokens=stopping.min_tokens,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        keep_special_tokens=parse_strings(field, kept, limits.kept_tokens, "texts", limits.kept_token_bytes, bad),
        interval=min(interval, model.max_context_tokens) if streaming else UNARY_INTERVAL,
    )


def _prompt_tail(output: pb.OutputOptions, limits: Limits, bad: Violations) -> int:
    bad.within("spec.output.prompt_tail", output.prompt_tail, Range(0, limits.prompt_tail))
    return output.prompt_tail


def _n(spec: pb.GenerationSpec, limits: Limits, streaming: bool, bad: Violations) -> tuple[int, int]:
    """(number of outputs to return, number of sequences to generate)."""
    n = spec.n if spec.HasField("n") else 1
    if not 1 <= n <= limits.n:
        bad.add("spec.n", f"is {n}, must be in [1, {limits.n}]", reason=Reason.OUT_OF_RANGE)
        n = 1
    best_of = spec.best_of if spec.HasField("best_of") else n
    if not n <= best_of <= limits.n:
        bad.add("spec.best_of", f"is {best_of}, must be in [{n} (n), {limits.n}]", reason=Reason.OUT_OF_RANGE)
        best_of = n
    if streaming and best_of > n:
        bad.add(
            "spec.best_of",
            f"is {best_of}, must be {n} (n) in a stream: only Generate can choose among outputs",
            reason=Reason.CONFLICT,
        )
    if spec.resume and best_of > n:
        bad.add(
            "spec.best_of",
            f"is {best_of}, must be {n} (n) with resume: the logprobs of resumed tokens are unknown",
            reason=Reason.CONFLICT,
        )
    return n, best_of


def _priority(value: int, bad: Violations) -> int:
    if value == pb.PRIORITY_UNSPECIFIED:
        return int(pb.PRIORITY_NORMAL)
    if value not in pb.Priority.values():
        bad.add(
            "spec.priority", f"is {value}, must be one of {', '.join(pb.Priority.keys())}", reason=Reason.UNKNOWN_VALUE
        )
    return value


def _time_limit(spec: pb.GenerationSpec, limits: Limits, bad: Violations) -> float | None:
    if not spec.HasField("time_limit"):
        return None
    return bad.duration("spec.time_limit", spec.time_limit, limits.time_limit)


def parse_request_id(text: str, bad: Violations) -> str:
    """The caller's id, or a new one if `text` is empty."""
    if text and not REQUEST_ID.fullmatch(text):
        bad.add(
            "spec.request_id",
            f"is {shown(text)}, must be at most 128 characters of [A-Za-z0-9._:-]",
            reason=Reason.INVALID_FORMAT,
        )
    return text or new_request_id()


def new_request_id() -> str:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    # Set the version to 7 and the variant to 0b10.
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))
