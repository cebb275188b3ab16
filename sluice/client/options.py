"""Types of prompts, and the options of `generate` and `stream`, which have the names of the fields in sluice.v1."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict

from sluice.client.loras import LoraWeights

Message = Mapping[str, Any]
"""A chat message: "role" ("system", "user", "assistant" or "tool"), "content", and other fields of
sluice.v1.ChatMessage, such as "tool_call_id" for the role "tool".

The content is text, or a list of parts: `{"type": "text", "text": …}`, and `{"type": "image", "data": …}` with the
bytes of a PNG, JPEG or WebP file. A call in "tool_calls" is `{"id": …, "name": …, "arguments_json": …}`, or has
OpenAI's form: `{"id": …, "type": "function", "function": {"name": …, "arguments": …}}`."""


class PromptEmbeds(TypedDict):
    """A prompt of embeddings in place of tokens."""

    prompt_embeds: Any
    """Embeddings [tokens, hidden size]; see `embeddings_of`."""


Prompt = str | Sequence[int] | Sequence[Message] | PromptEmbeds
"""Text, token ids, chat messages (to which the server applies the model's chat template), or embeddings."""

Seconds = float | timedelta
"""A duration; a number is in seconds."""


class TokenRangeRetention(TypedDict, total=False):
    """Retention priority of the KV cache blocks of a part of the prompt; see sluice.v1.TokenRangeRetention."""

    start: int
    """First token of the part."""
    end: int | None
    """Token after the last one of the part; None: the end of the prompt."""
    priority: int
    """0 (evicted first) to 100 (evicted last)."""
    duration: Seconds | None
    """How long the priority applies; None: until evicted."""


class KvCache(TypedDict, total=False):
    """Options of the KV cache; see sluice.v1.KvCacheOptions."""

    salt: str | None
    """Only requests with the same salt share cached prefixes."""
    prompt_retention: Sequence[TokenRangeRetention] | None
    decode_priority: int | None
    """Retention priority of generated blocks."""
    decode_duration: Seconds | None
    """How long `decode_priority` applies; None: until evicted."""


class Options(TypedDict, total=False):
    """Options of a generation. For an option that is missing or None, the server's default applies.

    Each option is documented at the field of the same name in sluice/v1/generation.proto and sampling.proto. An option
    whose field is a message is a mapping of the message's fields, such as `guided={"regex": "[a-z]+"}` or
    `kv_cache={"salt": "tenant", "decode_priority": 0}`. Durations are in seconds. In `speculation`, `draft_logits` can
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
    """Embeddings [virtual tokens, hidden size], see `embeddings_of`; or a mapping with "embeddings" and, for a prompt
    of token ids, "token_extra_ids"."""
    images: Sequence[bytes] | None
    """Image files, one for each placeholder in a text or in token ids. The images of a chat are parts of messages."""
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
    """Options of `tokenize`, with the names of fields of sluice.v1.TokenizeRequest and sluice.v1.ChatPrompt."""

    model: str | None
    add_special_tokens: bool | None
    offsets: bool | None
    """Whether to return the position of each token; for texts only."""
    tools_json: str | None
    """For chats only."""
    template_kwargs: Mapping[str, Any] | None
    """For chats only."""
    continue_final_message: bool | None
    """For chats only."""


OPTION_NAMES = frozenset(Options.__annotations__)
TOKENIZE_OPTION_NAMES = frozenset(TokenizeOptions.__annotations__)
