"""The fields that completions and chats share, and their translation into options of the ring."""

from typing import Any

import msgspec

from gateway.errors import invalid
from gateway.requests.guides import Guided
from sluice.client import Options

REFUSED = (
    "suffix", "audio", "functions", "function_call", "web_search_options", "moderation",
    # Fields of vLLM:
    "use_beam_search", "length_penalty", "logits_processors", "kv_transfer_params", "chat_template", "documents",
    "mm_processor_kwargs", "prompt_embeds", "guided_whitespace_pattern",
    # Fields of llama.cpp and of NVIDIA NIM:
    "grammar_lazy", "grammar_triggers", "nvext",
)  # fmt: skip
"""Fields that neither endpoint supports. Each endpoint adds fields that only the other one supports, if ignoring them
would change the answer."""
WITHOUT_MEANING = (
    "store", "metadata", "service_tier", "prediction",
    "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
    # Fields of vLLM:
    "spaces_between_special_tokens", "guided_decoding_backend",
)  # fmt: skip
"""Fields that are accepted and ignored, because they do not change the answer."""
SEEDS = 1 << 64
CLIENT_OPTIONS = frozenset(Options.__annotations__)


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's field: usage so far in each chunk."""


class Common(Guided, kw_only=True):
    model: str | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    safety_identifier: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    """Number of the prompt's last tokens to keep; -1: as many as fit into the context."""
    cache_salt: str | None = None

    @property
    def streams(self) -> bool:
        return bool(self.stream)

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_running_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def outputs(self) -> int:
        return 1 if self.n is None else self.n

    @property
    def logged_user(self) -> str | None:
        user = self.user or self.safety_identifier
        return user and ascii(user[:128])[1:-1]

    def check(self) -> None:
        """Check what the ring cannot check, because its request has no field for it. Raises ApiError."""
        if self.seed is not None and not -SEEDS // 2 <= self.seed < SEEDS:
            raise invalid("must be a 64-bit integer", "seed")
        if self.stream_options is not None and not self.stream:
            raise invalid("is only allowed with stream: true", "stream_options")

    @property
    def asked_tokens(self) -> int | None:
        """The maximum number of tokens of each output, if the request or its endpoint has one."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def truncate_to(self, context_tokens: int) -> None:
        """Truncate the prompt to its last tokens, as many as fit into the context beside the output."""
        self.truncate_prompt_tokens = max(1, context_tokens - max(1, self.asked_tokens or 1))

    def params(self) -> dict[str, str]:
        """Names of this request's fields by names of the ring's, for errors, where they depend on the request."""
        renamed = self.max_completion_tokens is not None
        return {"spec.stopping.max_tokens": "max_completion_tokens"} if renamed else {}

    def options(self) -> dict[str, Any]:
        """Options of `AsyncClient.stream` and `generate`."""
        options: dict[str, Any] = {
            name: getattr(self, name) for name in Common.__struct_fields__ if name in CLIENT_OPTIONS
        }
        options["max_tokens"] = self.asked_tokens
        options["top_k"] = 0 if self.top_k == -1 else self.top_k
        if self.top_p == 0:
            # The most likely token alone; the ring's top_p is above 0.
            options["top_p"], options["top_k"] = None, 1
        options["seed"] = None if self.seed is None else self.seed % SEEDS
        options["include_stop_in_output"] = self.include_stop_str_in_output
        options["priority"] = _priority(self.priority)
        if self.cache_salt:
            options["kv_cache"] = {"salt": self.cache_salt}
        return {name: value for name, value in options.items() if value is not None}


def _priority(number: int | None) -> str | None:
    """The ring's priority for vLLM's number: lower is earlier, 0 is normal."""
    if number is None:
        return None
    return "high" if number < 0 else "low" if number > 0 else "normal"
