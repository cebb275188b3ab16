"""A request to an executor, with the retention priorities of its KV cache blocks."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from os import fspath
from typing import Any, ClassVar, Literal, Self, TypedDict, get_args

from sluice.client import KvCache, Options, Prompt, TokenRangeRetention
from sluice.executor.errors import either
from sluice.executor.sampling import SamplingParams
from sluice.executor.waiting import Milliseconds, as_timedelta

Priority = Literal["low", "normal", "high"]
PRIORITIES = (None, *get_args(Priority))
# Of KV cache blocks, as in TensorRT-LLM.
DEFAULT_PRIORITY = 35


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Priority of the blocks of the prompt tokens [token_start, token_end)."""

    token_start: int
    token_end: int | None
    """None: the end of the prompt."""
    priority: int
    """0 (evicted first) to 100 (evicted last)."""
    duration_ms: Milliseconds | None = None
    """After it the default priority of 35 applies. None: until evicted."""

    def options(self) -> TokenRangeRetention:
        return TokenRangeRetention(
            start=self.token_start,
            end=self.token_end,
            priority=self.priority,
            duration=as_timedelta(self.duration_ms),
        )


@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Priorities of prompt ranges and of generated blocks; 35 if no range applies."""

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    decode_retention_priority: int = DEFAULT_PRIORITY
    decode_duration_ms: Milliseconds | None = None

    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig

    def options(self) -> KvCache:
        is_default = self.decode_retention_priority == DEFAULT_PRIORITY and self.decode_duration_ms is None
        return KvCache(
            prompt_retention=[each.options() for each in self.token_range_retention_configs],
            decode_priority=None if is_default else self.decode_retention_priority,
            decode_duration=as_timedelta(self.decode_duration_ms),
        )

    @property
    def is_bounded(self) -> bool:
        """Whether some range may exceed a short prompt."""
        return any(each.token_start or each.token_end is not None for each in self.token_range_retention_configs)

    def within(self, num_tokens: int) -> Self:
        """Cut to a prompt of `num_tokens`; ranges beyond it are dropped."""
        ranges = [
            each if each.token_end is None else replace(each, token_end=min(each.token_end, num_tokens))
            for each in self.token_range_retention_configs
            if each.token_start < num_tokens
        ]
        return replace(self, token_range_retention_configs=ranges)


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """A LoRA adapter. With a path it is loaded when a request first uses it; without, the server knows the name.

    Raises TypeError.
    """

    lora_name: str
    """The id on the server: one adapter per name."""
    lora_int_id: int = 0
    """The name identifies an adapter, so this only must be the same for all requests with the name."""
    lora_path: str = ""
    """Folder, as peft saves it: on this machine if the executor started its own ring, else on the engines'."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lora_path", fspath(self.lora_path))
        for name, kind in (("lora_name", str), ("lora_int_id", int), ("lora_path", str)):
            _check(name, getattr(self, name), kind)

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest:
    """A prompt adapter: rows of prompt tuning. With a path it is loaded when a request first uses it; without, the
    server knows the name.

    Raises TypeError.
    """

    prompt_adapter_name: str
    """The id on the server: one adapter per name."""
    prompt_adapter_id: int = 0
    """The name identifies an adapter, so this only must be the same for all requests with the name."""
    prompt_adapter_local_path: str = ""
    """Folder, as peft saves it: on this machine if the executor started its own ring, else on the routers'."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt_adapter_local_path", fspath(self.prompt_adapter_local_path))
        kinds = (("prompt_adapter_name", str), ("prompt_adapter_id", int), ("prompt_adapter_local_path", str))
        for name, kind in kinds:
            _check(name, getattr(self, name), kind)

    @property
    def adapter_id(self) -> int:
        return self.prompt_adapter_id

    @property
    def name(self) -> str:
        return self.prompt_adapter_name

    @property
    def local_path(self) -> str:
        return self.prompt_adapter_local_path

    @property
    def path(self) -> str:
        return self.prompt_adapter_local_path


class CommonOptions(TypedDict, total=False):
    """Options besides prompt and sampling; see the fields of `GenerationRequest`."""

    client_id: int | None
    return_all_generated_tokens: bool
    priority: Priority | None
    allotted_time_ms: Milliseconds | None
    model: str | None
    max_draft_tokens: int | None
    return_perf_metrics: bool
    tools: Sequence[Mapping[str, Any]] | None
    chat_template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool


class RequestOptions(CommonOptions, total=False):
    lora_request: LoRARequest | None
    prompt_adapter_request: PromptAdapterRequest | None
    kv_cache_retention_config: KvCacheRetentionConfig | None
    draft_token_ids: Sequence[int] | None
    draft_logits: Any
    acceptance_threshold: float | None
    prompt_table: Any
    images: Sequence[bytes] | None
    cache_salt: str | None


class BatchOptions(CommonOptions, total=False):
    """Options of several prompts: one value for all of them, or one for each."""

    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    prompt_adapter_request: PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
    kv_cache_retention_config: KvCacheRetentionConfig | Sequence[KvCacheRetentionConfig | None] | None
    cache_salt: str | Sequence[str | None] | None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt with its options. May be submitted any number of times. Raises TypeError."""

    inputs: Prompt = None  # type: ignore[assignment]  # required, unless prompt_token_ids is given
    """Text, token ids, chat messages, or embeddings: `{"prompt_embeds": rows}`."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    streaming: bool = False
    """Responses arrive with the tokens; otherwise one per output, when the last has ended."""
    lora_request: LoRARequest | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    client_id: int | None = None
    """From 0 to 2^64 - 1. Returned in every response and passed to logits processors; need not be unique."""
    return_all_generated_tokens: bool = False
    """Each response of a stream repeats the former tokens."""
    priority: Priority | None = None
    allotted_time_ms: Milliseconds | None = None
    """Counted from `submit`. At its end the request ends without an error, with the tokens so far."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    model: str | None = None
    max_draft_tokens: int | None = None
    """Tokens that are guessed and checked per output and step; 0: none; None: as the engine is configured."""
    draft_token_ids: Sequence[int] | None = None
    """What you expect the output to be, from its first token on. Changes speed alone, unless there are draft_logits."""
    draft_logits: Any = field(default=None, repr=False, compare=False)
    """What the draft tokens were drawn from: a numpy array or torch tensor [draft tokens, vocabulary]. They are then
    accepted by rejection sampling, which changes the output."""
    acceptance_threshold: float | None = None
    """In (0, 1], only with draft_logits: a draft token is accepted if its probability is at least this times the one
    that the draft gave it. Changes the output's distribution; None: times a random number, which keeps it."""
    return_perf_metrics: bool = False
    """Its result has `stats`. Engines report them twice a second, so the first response of a stream and the end come up
    to half a second later."""
    prompt_table: Any = field(default=None, compare=False, repr=False)
    """Prompt tuning: rows [virtual tokens, hidden size], a tensor or an array, or a mapping as in the client's options.
    Text and chats begin with them; in token ids, vocab_size + i stands for row i."""
    prompt_adapter_request: PromptAdapterRequest | None = None
    """Prompt tuning by rows that the server keeps; not with a prompt_table."""
    images: Sequence[bytes] | None = field(default=None, compare=False, repr=False)
    """Files of images, one for each of the model's placeholders in a text or in token ids; in chats they are parts of
    messages: `{"type": "image", "data": …}`."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Of a chat, in OpenAI's form, as are the next two."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    continue_final_message: bool = False
    prompt_token_ids: Sequence[int] | None = field(default=None, kw_only=True, repr=False, compare=False)
    """TensorRT-LLM's name of `inputs` that are token ids; None for text and chat."""
    id: int | None = field(default=None, init=False, compare=False)
    """The `request_id` of the result whose `request` this is; None before `submit`."""

    def __post_init__(self) -> None:
        inputs: Prompt = either("inputs", self.inputs, "prompt_token_ids", self.prompt_token_ids)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "prompt_token_ids", inputs if _is_token_ids(inputs) else None)
        _check("streaming", self.streaming, bool)
        if self.priority not in PRIORITIES:
            raise TypeError(f"priority must be {', '.join(map(repr, PRIORITIES))}, not {self.priority!r}")
        _check("sampling_params", self.sampling_params, SamplingParams)
        if self.lora_request is not None:
            _check("lora_request", self.lora_request, LoRARequest)
        if self.prompt_adapter_request is not None:
            _check("prompt_adapter_request", self.prompt_adapter_request, PromptAdapterRequest)
        if self.kv_cache_retention_config is not None:
            _check("kv_cache_retention_config", self.kv_cache_retention_config, KvCacheRetentionConfig)

    def with_id(self, request_id: int) -> Self:
        numbered = copy(self)
        object.__setattr__(numbered, "id", request_id)
        return numbered

    @property
    def allotted_seconds(self) -> float | None:
        allotted = as_timedelta(self.allotted_time_ms)
        return None if allotted is None else allotted.total_seconds()

    def client_options(self, wire_id: str) -> Options:
        kv_cache = self.kv_cache_retention_config.options() if self.kv_cache_retention_config else KvCache()
        if self.cache_salt is not None:
            kv_cache["salt"] = self.cache_salt
        return self.sampling_params.options() | Options(
            request_id=wire_id,
            token_ids=True,
            lora_id=self.lora_request.lora_name if self.lora_request else None,
            kv_cache=kv_cache or None,
            priority=self.priority,
            time_limit=self.allotted_seconds,
            model=self.model,
            client_id=self.client_id,
            speculation=self._speculation(),
            prompt_table=self.prompt_table,
            prompt_adapter_id=self.prompt_adapter_request.name if self.prompt_adapter_request else None,
            images=self.images,
            tools_json=None if self.tools is None else json.dumps(list(self.tools)),
            template_kwargs=self.chat_template_kwargs,
            continue_final_message=self.continue_final_message or None,
        )

    def _speculation(self) -> Mapping[str, Any] | None:
        names = ("max_draft_tokens", "draft_token_ids", "draft_logits", "acceptance_threshold")
        given = {name: getattr(self, name) for name in names}
        return {name: value for name, value in given.items() if value is not None} or None


def is_embeds(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and "prompt_embeds" in inputs


def _is_token_ids(inputs: Prompt) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, str) and isinstance(next(iter(inputs), 0), int)


def _check(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, not {type(value).__name__}")
