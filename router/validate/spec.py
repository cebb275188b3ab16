"""One validated request: `parse` makes it from a sluice.v1.GenerationSpec."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.errors import Range, Reason, RequestError, Violations, shown
from router.validate.adapter import Began, Find, parse_adapter
from router.validate.beams import parse_beams
from router.validate.fields import reject_unbuilt
from router.validate.guide import parse_guide
from router.validate.images import GivenImages, parse_images
from router.validate.logprobs import parse_logprobs
from router.validate.model import Limits, Model
from router.validate.prompt import Prompt, Retention, parse_prompt, parse_retention
from router.validate.request_id import parse_request_id
from router.validate.resume import check_seed, parse_began, parse_resume
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
    began = parse_began(spec.resume, bad)
    adapter, adapter_files = parse_adapter(spec, model, find_adapter, began.adapter, bad)
    stopping = parse_stopping(spec.stopping, model, limits, bad)
    num_outputs, n = _n(spec, limits, streaming, bad)
    logprobs, prompt_logprobs = parse_logprobs(spec.output, model, limits, bad)
    # Sequences are compared by their logprobs, whether or not these are returned.
    drawn_logprobs = 0 if logprobs is None and num_outputs < n else logprobs
    sampling = parse_sampling(spec.sampling, drawn_logprobs, model, limits, bad)
    sampling = parse_beams(spec, sampling, n, bad)
    table = parse_table(spec, limits, bad, find_table, began)
    resume = parse_resume(spec.resume, n, stopping, model, bad)
    check_seed(resume, sampling.greedy, spec.sampling.HasField("seed"), bad)
    found = Spec(
        request_id=parse_request_id(spec.request_id, bad),
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
