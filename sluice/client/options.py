"""Types of the prompt and of the options of `generate` and `stream`, which are named as in the .proto files."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict

from sluice.client.loras import LoraWeights

Message = Mapping[str, Any]
"""A chat message: "role" ("system", "user", "assistant" or "tool"), "content", and what else sluice.v1.ChatMessage has,
such as "tool_call_id" for role "tool".

The content is text, or a list of parts: `{"type": "text", "text": …}` and `{"type": "image", "data": …}`, the bytes of
a PNG, JPEG or WebP file. A call in "tool_calls" is `{"id": …, "name": …, "arguments_json": …}`, or as OpenAI writes it:
`{"id": …, "type": "function", "function": {"name": …, "arguments": …}}`."""


class PromptEmbeds(TypedDict):
    """A prompt of embeddings in place of tokens."""

    prompt_embeds: Any
    """Rows [tokens, hidden size]; see `embeddings_of`."""


Prompt = str | Sequence[int] | Sequence[Message] | PromptEmbeds
"""Text, token ids, chat messages, to which the server applies the model's chat template, or embeddings."""

Seconds = float | timedelta


class TokenRangeRetention(TypedDict, total=False):
    """Retention priority of a part of the prompt; see sluice.v1.TokenRangeRetention."""

    start: int
    end: int | None
    """Exclusive; None: the end of the prompt."""
    priority: int
    """0 (evicted first) to 100 (evicted last)."""
    duration: Seconds | None
    """None: until evicted."""


class KvCache(TypedDict, total=False):
    """Prefix-cache control; see sluice.v1.KvCacheOptions."""

    salt: str | None
    prompt_retention: Sequence[TokenRangeRetention] | None
    decode_priority: int | None
    decode_duration: Seconds | None


class Options(TypedDict, total=False):
    """Options of one generation. If one is missing or None, the server's default applies.

    Each is documented at the field of the same name in sluice/v1/generation.proto and sampling.proto. Fields that are
    messages there take a mapping of the same shape, such as `guided={"regex": "[a-z]+"}` or
    `kv_cache={"salt": "tenant", "decode_priority": 0}`. Durations are in seconds. `draft_logits` in `speculation` may
    also be a numpy array or a torch tensor.
    """

    request_id: str | None
    model: str | None
    n: int | None
    best_of: int | None
    lora_id: str | None
    lora_weights: LoraWeights | None
    """See `read_lora`."""
    prompt_adapter_id: str | None
    """See `Client.load_prompt_adapter`."""
    prompt_table: Any
    """Rows [virtual tokens, hidden size], see `embeddings_of`, or a mapping with these as "embeddings" and, with token
    ids, "token_extra_ids"."""
    images: Sequence[bytes] | None
    """Files of images, one for each placeholder in a text or in token ids; those of chats are parts of messages."""
    priority: Literal["low", "normal", "high"] | None
    time_limit: Seconds | None
    add_special_tokens: bool | None
    truncate_prompt_tokens: int | None
    guided: Mapping[str, Any] | None
    kv_cache: KvCache | None
    resume: Sequence[Mapping[str, Any]] | None
    resume_context_rows: int | None
    engine_deaths: int | None
    client_id: int | None
    speculation: Mapping[str, Any] | None

    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    seed: int | None
    logit_bias: Mapping[int, float] | None
    bad_token_ids: Sequence[int] | None
    bad_words: Sequence[str] | None
    allowed_token_ids: Sequence[int] | None
    no_repeat_ngram_size: int | None
    beam_search: Mapping[str, Any] | None
    logits_processors: Sequence[str] | None

    max_tokens: int | None
    min_tokens: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    include_stop_in_output: bool | None

    token_ids: bool | None
    logprobs: int | None
    prompt_logprobs: int | None
    echo: bool | None
    stream_interval: int | None
    skip_special_tokens: bool | None
    timings: bool | None
    context_logits: bool | None
    generation_logits: bool | None
    tensors: Sequence[Mapping[str, Any]] | None

    tools_json: str | None
    template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None


class TokenizeOptions(TypedDict, total=False):
    """Options of `tokenize`, named as in sluice.v1.TokenizeRequest and ChatPrompt."""

    model: str | None
    add_special_tokens: bool | None
    offsets: bool | None
    """Of texts only."""
    tools_json: str | None
    """This and those below: of chats only."""
    template_kwargs: Mapping[str, Any] | None
    continue_final_message: bool | None


OPTION_NAMES = frozenset(Options.__annotations__)
TOKENIZE_OPTION_NAMES = frozenset(TokenizeOptions.__annotations__)
