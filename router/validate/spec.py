"""One validated request: `parse` makes it from a sluice.v1.GenerationSpec, `fit` checks it against the context."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from router.errors import Range, Reason, RequestError, Violation, Violations, shown
from router.validate.adapter import VERSION, Began, Find, parse_adapter, split_fingerprint
from router.validate.beams import parse_beams
from router.validate.fields import reject_unbuilt
from router.validate.guide import parse_guide
from router.validate.images import GivenImages, parse_images
from router.validate.logprobs import parse_logprobs
from router.validate.model import Limits, Model
from router.validate.prompt import Prompt, Retention, parse_prompt, parse_retention
from router.validate.sampling import Stopping, parse_bad_words, parse_sampling, parse_stopping
from router.validate.speculation import parse_speculation
from router.validate.tables import FindTable, GivenTable, no_tables, parse_table
from router.validate.tensors import parse_tensors
from sluice.ring.adapters import Adapter, AdapterFiles
from sluice.ring.errors import ErrorCode
from sluice.ring.hashing import Domain
from sluice.ring.params import Guide, SamplingParams, Speculation, TextParams
from sluice.ring.tables import Table
from sluice.ring.tensors import NO_TENSORS, TensorParams
from sluice.v1 import generation_pb2 as pb

UNARY_INTERVAL = 128
"""Tokens per text batch of a unary request: a failed attempt loses fewer than this."""
ENGINE_DEATHS_RANGE = Range(0, 8)
REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}", re.ASCII)
FINGERPRINT = re.compile(r"[A-Za-z0-9]{1,64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Spec:
    """Every field is present and in range. The prompt is not tokenized yet."""

    request_id: str
    prompt: Prompt
    keep_prompt_tokens: int | None
    """Truncate the prompt to this many tokens, the last ones."""
    retention: Retention
    sampling: SamplingParams
    """Without the bad words, which are not tokenized yet."""
    bad_words: tuple[str, ...]
    stopping: Stopping
    text: TextParams
    n: int
    """Sequences that are generated."""
    num_outputs: int
    """Of these, how many are returned: if fewer, the most likely ones."""
    logprobs: int | None
    """Alternatives to return with each token; None: no logprobs are returned."""
    prompt_logprobs: int | None
    """The same for the tokens of the prompt. None with `resume`: the caller has them."""
    priority: int
    """1 low, 2 normal, 3 high."""
    salt: str
    time_limit: float | None
    """Seconds, from the request's arrival."""
    token_ids: bool
    echo: bool
    timings: bool
    streaming: bool
    resume: Mapping[int, tuple[int, ...]]
    """Tokens that the caller already has, by output index."""
    resume_model: str
    """Fingerprint of the model that generated them; empty: unknown."""
    client_id: int | None
    """For logits processors."""
    speculation: Speculation
    guide: Guide | None
    tensors: TensorParams = NO_TENSORS
    adapter: Adapter | None = None
    """With the weights that its id stood for when the request came."""
    adapter_files: AdapterFiles | None = None
    """That the request brought."""
    table: GivenTable | None = None
    images: GivenImages | None = None
    """None: the model takes none; else they may be none too."""
    engine_deaths: int = 0
    """Consecutive engine deaths under this request, as other routers reported."""

    def began(self, model: str) -> Began:
        """`model`: fingerprint of the one that it began with."""
        adapter = "" if self.adapter is None else self.adapter.version
        return Began(model, adapter, "" if self.table is None else self.table.version)

    @property
    def domain(self) -> Domain:
        return Domain(self.salt, "" if self.adapter is None else self.adapter.version)

    @property
    def chooses(self) -> bool:
        """Whether outputs are chosen among more sequences."""
        return self.num_outputs < self.n

    @property
    def sequences(self) -> int:
        """That an engine runs for it at once."""
        return self.n if self.sampling.beam_search is None else self.sampling.beam_search.width

    @property
    def hidden_size(self) -> int | None:
        """Of the rows of its table, if it has one."""
        return None if self.table is None else self.table.hidden_size

    @property
    def own_bytes(self) -> int:
        """Of the rows and images that it brought itself."""
        table = 0 if self.table is None or self.table.table is not None else len(self.table.data)
        return table if self.images is None else table + self.images.size

    @property
    def shared_tables(self) -> tuple[Table, ...]:
        """Of prompt adapters: others may have them too."""
        return () if self.table is None or self.table.table is None else (self.table.table,)

    @property
    def image_rows(self) -> int | None:
        """Of each of its images, if it has any."""
        return self.images.vision.rows if self.images is not None and self.images.images else None

    @property
    def resumed_tokens(self) -> int:
        """Total over all outputs; the engine computes them again."""
        return sum(map(len, self.resume.values()))

    def echoes(self, index: int) -> bool:
        """Whether this output begins with the prompt's text; a resumed stream has sent it already."""
        return self.echo and index not in self.resume and not any(self.resume.values())


def no_adapters(_: str) -> None:
    """See `Find`."""


def parse(
    spec: pb.GenerationSpec,
    model: Model,
    limits: Limits,
    streaming: bool,
    find_adapter: Find = no_adapters,
    find_table: FindTable = no_tables,
) -> Spec:
    """Raises RequestError: MODEL_NOT_FOUND, else NOT_BUILT_YET, else ADAPTER_NOT_FOUND, ADAPTER_MISSING or
    MODEL_CHANGED, else INVALID_ARGUMENT with every bad field."""
    # First what makes other violations pointless, then all of these in one answer.
    if find_adapter(spec.model) is None:
        check_model(spec.model, model, "spec.model")
    reject_unbuilt(spec)
    bad = Violations()
    began = _began(spec.resume, bad)
    adapter, adapter_files = parse_adapter(spec, model, find_adapter, began.adapter, bad)
    stopping = parse_stopping(spec.stopping, model, limits, bad)
    num_outputs, n = _n(spec, limits, streaming, bad)
    logprobs, prompt_logprobs = parse_logprobs(spec.output, model, limits, bad)
    # Sequences are compared by their logprobs, whether or not these are returned.
    drawn_logprobs = 0 if logprobs is None and num_outputs < n else logprobs
    sampling = parse_sampling(spec.sampling, drawn_logprobs, model, limits, bad)
    sampling = parse_beams(spec, sampling, n, bad)
    table = parse_table(spec, limits, bad, find_table, began)
    resume = _resume(spec.resume, n, stopping, model, bad)
    _check_seed(resume, sampling.greedy, spec.sampling.HasField("seed"), bad)
    found = Spec(
        request_id=_request_id(spec.request_id, bad),
        prompt=parse_prompt(spec, model, limits, bad, table),
        keep_prompt_tokens=_keep_prompt_tokens(spec, bad),
        retention=parse_retention(spec.kv_cache, limits, bad),
        sampling=sampling,
        bad_words=parse_bad_words(spec.sampling, limits, bad),
        stopping=stopping,
        text=_text_params(spec.output, stopping, model, streaming, bad),
        n=n,
        num_outputs=num_outputs,
        logprobs=logprobs,
        prompt_logprobs=None if any(resume.values()) else prompt_logprobs,
        priority=_priority(spec.priority, bad),
        salt=spec.kv_cache.salt,
        time_limit=_time_limit(spec, limits, bad),
        token_ids=spec.output.token_ids,
        echo=spec.output.echo,
        timings=spec.output.timings,
        streaming=streaming,
        resume=resume,
        engine_deaths=spec.engine_deaths,
        guide=parse_guide(spec.guided, limits, bad),
        speculation=parse_speculation(spec.speculation, model, limits, bad),
        client_id=spec.client_id if spec.HasField("client_id") else None,
        resume_model=began.model,
        adapter=adapter,
        adapter_files=adapter_files,
        tensors=parse_tensors(spec, bad),
        table=table,
        images=parse_images(spec, model, limits, table, bad),
    )
    bad.at_most("spec.kv_cache.salt", len(spec.kv_cache.salt.encode()), limits.salt_bytes, "bytes")
    bad.within("spec.engine_deaths", spec.engine_deaths, ENGINE_DEATHS_RANGE)
    bad.raise_if_any()
    return found


def check_model(name: str, model: Model, field: str) -> None:
    """Raises RequestError MODEL_NOT_FOUND unless `name` is the served model or empty."""
    if name not in ("", model.name):
        message = f"{field} is {shown(name)}; the model served here is {model.name!r}"
        metadata = {"model": shown(name), "served": model.name}
        raise RequestError(ErrorCode.MODEL_NOT_FOUND, message, metadata=metadata, private=True)


def fit(spec: Spec, prompt_tokens: int, context_tokens: int) -> int:
    """The request's max_tokens, at least 1; as many as fit if the caller set none.

    Raises RequestError: INVALID_ARGUMENT for a prompt without tokens, CONTEXT_OVERFLOW with both numbers.
    """
    if prompt_tokens == 0:
        raise RequestError.invalid(
            [Violation(spec.prompt.field, "has no tokens, must have at least one", reason=Reason.MISSING)]
        )
    room = context_tokens - prompt_tokens
    wanted = spec.stopping.max_tokens
    with_prompt = f"with {prompt_tokens} prompt tokens"
    context = f"the context of {context_tokens} tokens"
    if room < 1:
        raise _overflow(spec.prompt.field, f"has {prompt_tokens} tokens, which leaves no room in {context}")
    if wanted is not None and wanted > room:
        total = prompt_tokens + wanted
        raise _overflow("spec.stopping.max_tokens", f"is {wanted}, {with_prompt} that is {total}, more than {context}")
    if spec.stopping.min_tokens > room:
        least = spec.stopping.min_tokens
        raise _overflow("spec.stopping.min_tokens", f"is {least}, but {with_prompt} only {room} fit {context}")
    for index, ids in spec.resume.items():
        if len(ids) > room:
            found = f"has {len(ids)} tokens of output {index}"
            raise _overflow("spec.resume", f"{found}, but {with_prompt} only {room} fit {context}")
    return wanted or room


def new_request_id() -> str:
    """A UUIDv7 (RFC 9562): 48 bits of Unix milliseconds, then random bits."""
    value = (time.time_ns() // 1_000_000) << 80 | int.from_bytes(os.urandom(10))
    # The version, 7, and the variant, 0b10.
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


def _request_id(given: str, bad: Violations) -> str:
    if given and not REQUEST_ID.fullmatch(given):
        bad.add(
            "spec.request_id",
            f"is {shown(given)}, must be up to 128 bytes of [A-Za-z0-9._:-]",
            reason=Reason.INVALID_FORMAT,
        )
    return given or new_request_id()


def _keep_prompt_tokens(spec: pb.GenerationSpec, bad: Violations) -> int | None:
    if not spec.HasField("truncate_prompt_tokens"):
        return None
    if spec.truncate_prompt_tokens == 0:
        bad.add("spec.truncate_prompt_tokens", "is 0, must be at least 1", reason=Reason.OUT_OF_RANGE)
    return spec.truncate_prompt_tokens


def _text_params(
    output: pb.OutputOptions, stopping: Stopping, model: Model, streaming: bool, bad: Violations
) -> TextParams:
    interval = output.stream_interval if output.HasField("stream_interval") else 1
    if interval == 0:
        bad.add("spec.output.stream_interval", "is 0, must be at least 1", reason=Reason.OUT_OF_RANGE)
    return TextParams(
        stop=stopping.strings,
        include_stop=stopping.include_stop,
        min_tokens=stopping.min_tokens,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        interval=min(interval, model.max_context_tokens) if streaming else UNARY_INTERVAL,
    )


def _n(spec: pb.GenerationSpec, limits: Limits, streaming: bool, bad: Violations) -> tuple[int, int]:
    """(n, best_of)."""
    n = spec.n if spec.HasField("n") else 1
    if not 1 <= n <= limits.n:
        bad.add("spec.n", f"is {n}, must be in [1, {limits.n}]", reason=Reason.OUT_OF_RANGE)
        n = 1
    best_of = spec.best_of if spec.HasField("best_of") else n
    if not n <= best_of <= limits.n:
        bad.add("spec.best_of", f"is {best_of}, must be in [{n}, {limits.n}]: at least n", reason=Reason.OUT_OF_RANGE)
        best_of = n
    if streaming and best_of > n:
        bad.add(
            "spec.best_of",
            f"is {best_of}, must be n, which is {n}: only Generate can choose among outputs",
            reason=Reason.CONFLICT,
        )
    if spec.resume and best_of > n:
        bad.add(
            "spec.best_of",
            f"is {best_of}, must be {n} (n): with resume not all logprobs are known",
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


def _resume(
    given: Sequence[pb.ResumeFrom], n: int, stopping: Stopping, model: Model, bad: Violations
) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    most = stopping.max_tokens or model.max_context_tokens
    for i, part in enumerate(given):
        field = f"spec.resume[{i}]"
        if part.index >= n:
            bad.add(f"{field}.index", f"is {part.index}, must be less than n, which is {n}", reason=Reason.OUT_OF_RANGE)
            return {}
        if part.index in found:
            bad.add(f"{field}.index", f"is {part.index}, which was given before", reason=Reason.DUPLICATE)
            return {}
        if bad.at_most(f"{field}.token_ids", len(part.token_ids), most, "ids"):
            bad.token_ids(f"{field}.token_ids", part.token_ids, model.vocab_size)
        found[part.index] = tuple(part.token_ids)
    return found


def _began(given: Sequence[pb.ResumeFrom], bad: Violations) -> Began:
    found = given[0].model_fingerprint if given else ""
    began = split_fingerprint(found)
    versions = [version for version in began[1:] if version]
    if found and not (FINGERPRINT.fullmatch(began.model) and all(map(VERSION.fullmatch, versions))):
        bad.add(
            "spec.resume[0].model_fingerprint",
            f"is {shown(found)}, must be what Started returned",
            reason=Reason.CONFLICT,
        )
        return Began()
    for i, part in enumerate(given):
        if part.model_fingerprint != found:
            both = f"is {shown(part.model_fingerprint)} and that of spec.resume[0] {shown(found)}: they must be equal"
            bad.add(f"spec.resume[{i}].model_fingerprint", both, reason=Reason.CONFLICT)
            break
    return began


def _check_seed(resumed: Mapping[int, tuple[int, ...]], greedy: bool, seed_given: bool, bad: Violations) -> None:
    # Only the seed that drew the tokens so far continues the same sequence.
    if any(resumed.values()) and not greedy and not seed_given:
        field = "spec.sampling.seed"
        bad.add(
            field,
            "is not set: with resume and a temperature above 0 it must be what Started returned",
            reason=Reason.MISSING,
        )


def _overflow(field: str, description: str) -> RequestError:
    return RequestError.invalid([Violation(field, description, reason=Reason.TOO_MANY)], ErrorCode.CONTEXT_OVERFLOW)
