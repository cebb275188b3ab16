"""A request to an executor: its prompt, options and adapters, and the retention priorities of its KV cache blocks."""

import json
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import astuple, dataclass, field, fields, replace
from os import fspath
from typing import Any, ClassVar, Literal, Self, TypedDict, get_args

from sluice.client import KvCache, Options, Prompt, TokenRangeRetention
from sluice.client.values import as_ids, is_array, is_id
from sluice.executor.errors import check_type, either
from sluice.executor.sampling import SamplingParams
from sluice.executor.waiting import Milliseconds, as_timedelta
from sluice.settings.names import checks_options

Priority = Literal["low", "normal", "high"]
PRIORITIES = (None, *get_args(Priority))
OTHER_LIBRARIES = {
    **dict.fromkeys(("query_token_ids", "input_token_ids", "prompt"), "'inputs'"),
    **dict.fromkeys(("multimodal_params", "multi_modal_data", "multimodal_input"), "images=[...]"),
    "arrival_time": "allotted_time_ms=..., a time limit that begins with `submit`; results have `timings`",
    "external_draft_tokens_config": "draft_token_ids=..., draft_logits=..., acceptance_threshold=...",
    "prompt_tuning_config": "prompt_table=...",
    "lora_config": "lora_request=LoRARequest(...)",
}
"""What to write in place of options of other libraries."""
DEFAULT_PRIORITY = 35
"""Retention priority of KV cache blocks, as in TensorRT-LLM."""


@dataclass(frozen=True, slots=True)
class AdapterRequest:
    """What the requests of both kinds of adapter share. Their fields are a name, a number and a path, in this order.

    Raises TypeError for a field of the wrong type.
    """

    def __post_init__(self) -> None:
        names = [each.name for each in fields(self)]
        object.__setattr__(self, names[-1], fspath(self.path))
        for name, kind in zip(names, (str, int, str), strict=True):
            check_type(name, getattr(self, name), kind)

    @property
    def name(self) -> str:
        return self._values()[0]

    @property
    def adapter_id(self) -> int:
        return self._values()[1]

    @property
    def path(self) -> str:
        return self._values()[2]

    def _values(self) -> tuple[str, int, str]:
        name, number, path = astuple(self)
        return name, number, path


@dataclass(frozen=True, slots=True)
class LoRARequest(AdapterRequest):
    """A LoRA adapter. It is loaded when a request first uses it; without a path it must be on the server already.

    Raises TypeError for a field of the wrong type.
    """

    lora_name: str
    """Id of the adapter on the server. Each name stands for one adapter."""
    lora_int_id: int = 0
    """Must be the same in all requests with this name; otherwise unused, since the name identifies the adapter."""
    lora_path: str = ""
    """Folder as peft saves it, on this machine if the executor started its ring, else on the engines' machines."""


@dataclass(frozen=True, slots=True)
class PromptAdapterRequest(AdapterRequest):
    """A prompt adapter: the trained embeddings of prompt tuning.

    It is loaded when a request first uses it; without a path it must be on the server already. Raises TypeError for a
    field of the wrong type.
    """

    prompt_adapter_name: str
    """Id of the adapter on the server. Each name stands for one adapter."""
    prompt_adapter_id: int = 0
    """Must be the same in all requests with this name; otherwise unused, since the name identifies the adapter."""
    prompt_adapter_local_path: str = ""
    """Folder as peft saves it, on this machine if the executor started its ring, else on the routers' machines."""

    @property
    def local_path(self) -> str:
        return self.prompt_adapter_local_path


@dataclass(frozen=True, slots=True)
class TokenRangeRetentionConfig:
    """Retention priority of the KV cache blocks of the prompt tokens [token_start, token_end)."""

    token_start: int
    token_end: int | None
    """None: the end of the prompt."""
    priority: int
    """0 (evicted first) to 100 (evicted last)."""
    duration_ms: Milliseconds | None = None
    """How long the priority applies, before the default of 35; a number is milliseconds. None: until evicted."""

    def options(self) -> TokenRangeRetention:
        return TokenRangeRetention(
            start=self.token_start,
            end=self.token_end,
            priority=self.priority,
            duration=as_timedelta(self.duration_ms),
        )


@checks_options({"max_tokens": "KvCacheConfig(max_tokens=...), which bounds the cache"})
@dataclass(frozen=True, slots=True)
class KvCacheRetentionConfig:
    """Retention priorities of a request's KV cache blocks, from 0 (evicted first) to 100 (evicted last)."""

    token_range_retention_configs: Sequence[TokenRangeRetentionConfig] = ()
    """Priorities of parts of the prompt. The rest of the prompt has priority 35."""
    decode_retention_priority: int = DEFAULT_PRIORITY
    """Priority of generated blocks."""
    decode_duration_ms: Milliseconds | None = None
    """How long `decode_retention_priority` applies; a number is milliseconds. None: until evicted."""

    TokenRangeRetentionConfig: ClassVar[type[TokenRangeRetentionConfig]] = TokenRangeRetentionConfig

    def options(self) -> KvCache:
        is_default = self.decode_retention_priority == DEFAULT_PRIORITY and self.decode_duration_ms is None
        return KvCache(
            prompt_retention=[config.options() for config in self.token_range_retention_configs],
            decode_priority=None if is_default else self.decode_retention_priority,
            decode_duration=as_timedelta(self.decode_duration_ms),
        )

    @property
    def is_bounded(self) -> bool:
        """Whether a range has a bound, which may exceed a short prompt."""
        return any(config.token_start or config.token_end is not None for config in self.token_range_retention_configs)

    def within(self, num_tokens: int) -> Self:
        """Clip the ranges to a prompt of `num_tokens`, and drop those beyond it."""
        ranges = [
            config if config.token_end is None else replace(config, token_end=min(config.token_end, num_tokens))
            for config in self.token_range_retention_configs
            if config.token_start < num_tokens
        ]
        return replace(self, token_range_retention_configs=ranges)


OPTIONAL_PARTS: Mapping[str, type] = {
    "lora_request": LoRARequest,
    "prompt_adapter_request": PromptAdapterRequest,
    "kv_cache_retention_config": KvCacheRetentionConfig,
}


class CommonOptions(TypedDict, total=False):
    """Options of `generate` and `generate_async`; see the fields of `GenerationRequest`."""

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
    """Options of a single prompt; see the fields of `GenerationRequest`."""

    client_id: int | None
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
    """Options of a list of prompts: one value for all of them, or a list with one value per prompt."""

    client_id: int | Sequence[int | None] | None
    lora_request: LoRARequest | Sequence[LoRARequest | None] | None
    prompt_adapter_request: PromptAdapterRequest | Sequence[PromptAdapterRequest | None] | None
    kv_cache_retention_config: KvCacheRetentionConfig | Sequence[KvCacheRetentionConfig | None] | None
    draft_token_ids: Sequence[Sequence[int] | None] | None
    draft_logits: Sequence[Any] | None
    images: Sequence[Sequence[bytes] | None] | None
    prompt_table: Any
    cache_salt: str | Sequence[str | None] | None


@checks_options({each.name: f"SamplingParams({each.name}=...)" for each in fields(SamplingParams)} | OTHER_LIBRARIES)
@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A prompt with its options, which can be submitted any number of times.

    Raises TypeError for a field of the wrong type.
    """

    inputs: Prompt = None  # type: ignore[assignment]  # required, unless prompt_token_ids is given
    """The prompt: text, token ids, chat messages, or embeddings as `{"prompt_embeds": rows}`."""
    sampling_params: SamplingParams = field(default_factory=SamplingParams)
    streaming: bool = False
    """Whether responses arrive with the tokens; otherwise there is one response per output, when all have ended."""
    lora_request: LoRARequest | None = None
    kv_cache_retention_config: KvCacheRetentionConfig | None = None
    client_id: int | None = None
    """From 0 to 2^64 - 1. Returned in every response and passed to logits processors. Need not be unique."""
    return_all_generated_tokens: bool = False
    """Whether each response of a stream repeats the tokens before it."""
    priority: Priority | None = None
    """Scheduling priority: "low", "normal" or "high". None: normal."""
    allotted_time_ms: Milliseconds | None = None
    """Time limit, counted from `submit`; a number is milliseconds. When it expires, the request ends with the tokens so
    far and finish reason "timeout", without an error."""
    cache_salt: str | None = None
    """Only requests with the same salt share cached prefixes."""
    model: str | None = None
    """Name of a served model. None: the default model."""
    max_draft_tokens: int | None = None
    """Draft tokens per output and step; 0: no speculation; None: the engine's setting."""
    draft_token_ids: Sequence[int] | None = None
    """The expected output, from its first token on. Without `draft_logits` it affects only the speed."""
    draft_logits: Any = field(default=None, repr=False, compare=False)
    """Logits that the draft tokens were sampled from: a numpy array or torch tensor [draft tokens, vocabulary]. With
    them, draft tokens are accepted by rejection sampling, which changes the output."""
    acceptance_threshold: float | None = None
    """In (0, 1], with `draft_logits` only: a draft token is accepted if its probability is at least this fraction of
    its probability under the draft, which changes the output's distribution. None: compare with a random fraction,
    which preserves the distribution."""
    return_perf_metrics: bool = False
    """Whether the result has `stats`. Engines report them twice a second, which delays the first response of a stream,
    and the end, by up to half a second."""
    prompt_table: Any = field(default=None, compare=False, repr=False)
    """Prompt tuning: embeddings [virtual tokens, hidden size] as a tensor or array, or a mapping as in the option of
    `sluice.client.Client.generate`. They precede a text or a chat; in token ids, vocab_size + i stands for row i."""
    prompt_adapter_request: PromptAdapterRequest | None = None
    """Prompt tuning with embeddings that the server keeps. Cannot be combined with `prompt_table`."""
    images: Sequence[bytes] | None = field(default=None, compare=False, repr=False)
    """Image files, one for each of the model's image placeholders in a text or in token ids. The images of a chat are
    parts of its messages: `{"type": "image", "data": …}`."""
    tools: Sequence[Mapping[str, Any]] | None = None
    """Tools that a chat's model may call, in OpenAI's format."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    """Variables of the chat template."""
    continue_final_message: bool = False
    """Whether the output continues the last message of a chat, instead of starting a new one."""
    prompt_token_ids: Sequence[int] | None = field(default=None, kw_only=True, repr=False, compare=False)
    """TensorRT-LLM's name of `inputs` that are token ids; None for text and chats."""
    id: int | None = field(default=None, init=False, compare=False)
    """In a result's `request`: its `request_id`. None before `submit`."""

    def __post_init__(self) -> None:
        ids = None if self.prompt_token_ids is None else as_ids("prompt_token_ids", self.prompt_token_ids)
        inputs: Prompt = either("inputs", _plain(self.inputs), "prompt_token_ids", ids)
        object.__setattr__(self, "inputs", inputs)
        object.__setattr__(self, "prompt_token_ids", inputs if _is_token_ids(inputs) else None)
        check_type("streaming", self.streaming, bool)
        if self.priority not in PRIORITIES:
            raise TypeError(f"priority must be {', '.join(map(repr, PRIORITIES))} (got {self.priority!r})")
        check_type("sampling_params", self.sampling_params, SamplingParams)
        # A copy, which is checked again: the caller may have changed the parameters, and may change them later.
        object.__setattr__(self, "sampling_params", replace(self.sampling_params))
        for name, kind in OPTIONAL_PARTS.items():
            if getattr(self, name) is not None:
                check_type(name, getattr(self, name), kind)

    def with_id(self, request_id: int) -> Self:
        """A copy of the request with this `id`."""
        request = copy(self)
        object.__setattr__(request, "id", request_id)
        return request

    @property
    def allotted_seconds(self) -> float | None:
        allotted = as_timedelta(self.allotted_time_ms)
        return None if allotted is None else allotted.total_seconds()

    def client_options(self, wire_id: str) -> Options:
        """Options of `sluice.client` for this request, with `wire_id` as its id at the server."""
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
        options = {name: getattr(self, name) for name in names}
        return {name: value for name, value in options.items() if value is not None} or None


def is_embeds(inputs: Any) -> bool:
    return isinstance(inputs, Mapping) and "prompt_embeds" in inputs


def _plain(inputs: Any) -> Any:
    """The prompt, with token ids as Python's integers, also if they are numpy's or torch's. Raises TypeError."""
    if is_array(inputs) or (isinstance(inputs, list | tuple) and inputs and is_id(inputs[0])):
        return as_ids("inputs", inputs)
    return inputs


def _is_token_ids(inputs: Prompt) -> bool:
    return isinstance(inputs, Sequence) and not isinstance(inputs, str) and isinstance(next(iter(inputs), 0), int)
