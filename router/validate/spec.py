"""One request, bounded: what `parse` makes of a sluice.v1.GenerationSpec."""

import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass

from router.errors import RequestError
from router.validate.durations import bounded_seconds
from router.validate.fields import refuse_unbuilt
from router.validate.guide import check_guide
from router.validate.limits import Limits
from router.validate.model import Model
from router.validate.prompt import Prompt, parse_prompt
from router.validate.resume import check_seed, parse_model, parse_resume
from router.validate.retention import Retention, parse_retention
from router.validate.sampling import parse_sampling
from router.validate.stopping import Stopping, parse_stopping
from router.validate.violations import Violations, shown
from sluice.ring.errors import ErrorCode
from sluice.ring.params import SamplingParams, TextParams
from sluice.v1 import generation_pb2

UNARY_INTERVAL = 128
"""Tokens after which the router hears of a unary answer: where it goes on if an engine is lost."""
MAX_ENGINE_DEATHS = 8
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Spec:
    """Every field present and in range; only the prompt's tokens are still to be found."""

    request_id: str
    prompt: Prompt
    keep_prompt_tokens: int | None
    """Keep only so many, the last ones."""
    retention: Retention
    sampling: SamplingParams
    stopping: Stopping
    text: TextParams
    n: int
    priority: int
    """1 low, 2 normal, 3 high."""
    salt: str
    time_limit: float | None
    """Seconds, from the request's arrival."""
    token_ids: bool
    """Return ids."""
    echo: bool
    timings: bool
    streaming: bool
    resume: Mapping[int, tuple[int, ...]]
    """By output, the tokens that the caller has."""
    resume_model: str
    """Fingerprint of the model that these are of; empty: not known."""
    engine_deaths: int = 0
    """Under this request, at other routers."""

    @property
    def resumed_tokens(self) -> int:
        """Of all outputs; the engine computes them again."""
        return sum(map(len, self.resume.values()))

    def echoes(self, index: int) -> bool:
        """Whether the prompt's text comes before that of this output: it did before what the caller has."""
        return self.echo and index not in self.resume and not any(self.resume.values())


def parse(spec: generation_pb2.GenerationSpec, model: Model, limits: Limits, streaming: bool) -> Spec:
    """Raises RequestError: MODEL_NOT_FOUND, else NOT_BUILT_YET, else INVALID_ARGUMENT with every bad field.

    What is not built yet is INVALID_ARGUMENT where it is too large.
    """
    check_model(spec.model, model, "spec.model")
    bad = Violations()
    check_guide(spec.guided, limits, bad)
    bad.raise_if_any()
    refuse_unbuilt(spec)
    stopping = parse_stopping(spec.stopping, model, limits, bad)
    n = _n(spec, limits, bad)
    _check_best_of(spec, n, bad)
    sampling = parse_sampling(spec.sampling, _logprobs(spec.output, limits, bad), model, limits, bad)
    resume = parse_resume(spec.resume, n, stopping, model, bad)
    if spec.engine_deaths > MAX_ENGINE_DEATHS:
        bad.add("spec.engine_deaths", f"is {spec.engine_deaths}, must be in [0, {MAX_ENGINE_DEATHS}]")
    check_seed(resume, sampling.greedy, spec.sampling.HasField("seed"), bad)
    found = Spec(
        request_id=_request_id(spec.request_id, bad),
        prompt=parse_prompt(spec, model, limits, bad),
        keep_prompt_tokens=_keep_prompt_tokens(spec, bad),
        retention=parse_retention(spec.kv_cache, limits, bad),
        sampling=sampling,
        stopping=stopping,
        text=_text_params(spec.output, stopping, model, streaming, bad),
        n=n,
        priority=_priority(spec.priority, bad),
        salt=_salt(spec.kv_cache, limits, bad),
        time_limit=_time_limit(spec, limits, bad),
        token_ids=spec.output.token_ids,
        echo=spec.output.echo,
        timings=spec.output.timings,
        streaming=streaming,
        resume=resume,
        engine_deaths=spec.engine_deaths,
        resume_model=parse_model(spec.resume, bad),
    )
    bad.raise_if_any()
    return found


def check_model(name: str, model: Model, field: str) -> None:
    """The served name, or empty for the default. Raises RequestError MODEL_NOT_FOUND."""
    if name not in ("", model.name):
        raise RequestError(
            ErrorCode.MODEL_NOT_FOUND,
            f"{field} is {shown(name)}; the model served here is {model.name!r}",
            metadata={"model": shown(name), "served": model.name},
            private=True,
        )


def new_request_id() -> str:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _request_id(given: str, bad: Violations) -> str:
    if given and not REQUEST_ID.fullmatch(given):
        bad.add("spec.request_id", f"is {shown(given)}, must be up to 128 bytes of [A-Za-z0-9._:-]")
    return given or new_request_id()


def _keep_prompt_tokens(spec: generation_pb2.GenerationSpec, bad: Violations) -> int | None:
    if not spec.HasField("truncate_prompt_tokens"):
        return None
    if spec.truncate_prompt_tokens == 0:
        bad.add("spec.truncate_prompt_tokens", "is 0, must be at least 1")
    return spec.truncate_prompt_tokens


def _logprobs(output: generation_pb2.OutputOptions, limits: Limits, bad: Violations) -> int | None:
    if not output.HasField("logprobs"):
        return None
    if output.logprobs > limits.logprobs:
        bad.add("spec.output.logprobs", f"is {output.logprobs}, must be in [0, {limits.logprobs}]")
    return output.logprobs


def _text_params(
    output: generation_pb2.OutputOptions, stopping: Stopping, model: Model, streaming: bool, bad: Violations
) -> TextParams:
    interval = output.stream_interval if output.HasField("stream_interval") else 1
    if interval == 0:
        bad.add("spec.output.stream_interval", "is 0, must be at least 1")
    return TextParams(
        stop=stopping.strings,
        include_stop=stopping.include_stop,
        min_tokens=stopping.min_tokens,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        interval=min(interval, model.max_context_tokens) if streaming else UNARY_INTERVAL,
    )


def _n(spec: generation_pb2.GenerationSpec, limits: Limits, bad: Violations) -> int:
    n = spec.n if spec.HasField("n") else 1
    if not 1 <= n <= limits.n:
        bad.add("spec.n", f"is {n}, must be in [1, {limits.n}]")
        return 1
    return n


def _check_best_of(spec: generation_pb2.GenerationSpec, n: int, bad: Violations) -> None:
    """More than n is not built yet."""
    if spec.HasField("best_of") and spec.best_of < n:
        bad.add("spec.best_of", f"is {spec.best_of}, must be at least n, which is {n}")


def _priority(value: int, bad: Violations) -> int:
    if value == generation_pb2.PRIORITY_UNSPECIFIED:
        return int(generation_pb2.PRIORITY_NORMAL)
    if value not in generation_pb2.Priority.values():
        bad.add("spec.priority", f"is {value}, must be one of {', '.join(generation_pb2.Priority.keys())}")
    return value


def _salt(options: generation_pb2.KvCacheOptions, limits: Limits, bad: Violations) -> str:
    bad.at_most("spec.kv_cache.salt", len(options.salt.encode()), limits.salt_bytes, "bytes")
    return options.salt


def _time_limit(spec: generation_pb2.GenerationSpec, limits: Limits, bad: Violations) -> float | None:
    if not spec.HasField("time_limit"):
        return None
    return bounded_seconds("spec.time_limit", spec.time_limit, limits.time_limit, bad)
