"""Types of prompts, and the options of `generate` and `stream`, which have the names of the fields in sluice.v1."""

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, TypedDict

from sluice.client.adapters import LoraWeights

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
"""Text, token ids, chat messages (to which the server applies the model's chat template), or embeddings.

Token ids, here and in options, may also be a numpy array or a torch tensor of one dimension."""

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
    """Retention priorities of parts of the prompt."""
    decode_priority: int | None
    """Retention priority of generated blocks."""
    decode_duration: Seconds | None
    """How long `decode_priority` applies; None: until evicted."""


class Options(TypedDict, total=False):
    """Options of a generation. For an option that is missing or None, the server's default applies.

    docs/reference/client.md has a table of all options. Most requests need few of them: `max_tokens`, `temperature`,
    `top_p`, `top_k`, `seed`, `stop=["END"]`, `n`, `logprobs=2`, `guided`. Each option is documented at the field of the
    same name in sluice/v1/generation.proto and sampling.proto. An option whose field is a message is a mapping of the
    message's fields, such as `guided={"regex": "[a-z]+"}` or `kv_cache={"salt": "tenant", "decode_priority": 0}`.
    Durations are in seconds. In `speculation`, `draft_logits` can also be a numpy array or a torch tensor.
    """

    request_id: str | None
    """Unique id of the request; default: the server creates one."""
    model: str | None
    """Name of the served model, or id of a loaded LoRA adapter."""
    n: int | None
    """Number of outputs to return."""
    best_of: int | None
    """Number of outputs to generate, of which the n most likely are returned; for `generate` only."""
    lora_id: str | None
    """Id of a loaded LoRA adapter."""
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
    """Scheduling priority."""
    time_limit: Seconds | None
    """Time after which the outputs end, without an error, with finish reason TIME_LIMIT."""
    max_queue_time: Seconds | None
    """Time after which a request that no engine has begun fails with Overloaded."""
    add_special_tokens: bool | None
    """Whether to add tokens such as BOS to the prompt. Default: yes for text, no for chats."""
    truncate_prompt_tokens: int | None
    """Keep only this many of the last prompt tokens."""
    guided: Mapping[str, Any] | type[object] | None
    """Constraint on the outputs: `{"json_schema": schema}`, `{"json_object": True}`, `{"regex": …}`, `{"ebnf": …}`,
    `{"choice": ["yes", "no"]}` or `{"structural_tag": …}`; see docs/guided.md. A schema is a mapping, a JSON text or a
    Pydantic model. `guided=Model` is short for `guided={"json_schema": Model}`."""
    kv_cache: KvCache | None
    """Sharing of cached prefixes, and retention of the request's blocks."""
    resume: Sequence[Mapping[str, Any]] | None
    """The part of a broken stream that the caller has received; entries are fields of sluice.v1.ResumeFrom. `stream`
    resumes on its own."""
    resume_context_rows: int | None
    """With `resume`: number of rows received of each tensor of the prompt."""
    engine_deaths: int | None
    """Number of engines that died while running the request at other routers."""
    client_id: int | None
    """Number that is passed to logits processors."""
    speculation: Mapping[str, Any] | None
    """Speculative decoding, such as `{"max_draft_tokens": 4}`; fields of sluice.v1.Speculation."""

    temperature: float | None
    """From 0 (greedy) to 2."""
    top_k: int | None
    """Sample from this many most likely tokens; 0: off."""
    top_p: float | None
    """Sample from the most likely tokens whose probabilities sum to this; 1: off."""
    min_p: float | None
    """Sample from tokens whose probability is at least this fraction of the highest; 0: off."""
    repetition_penalty: float | None
    """Makes tokens of the prompt and the output less likely; 1: off."""
    presence_penalty: float | None
    """Subtracted from the logits of tokens that occur in the output; 0: off."""
    frequency_penalty: float | None
    """Subtracted from the logit of a token once per occurrence in the output; 0: off."""
    seed: int | None
    """Seed of the random numbers; default: random."""
    logit_bias: Mapping[int, float] | None
    """Bias to add to the logits, by token id."""
    bad_token_ids: Sequence[int] | None
    """Tokens that must not be generated."""
    bad_words: Sequence[str] | None
    """Words that must not be generated."""
    allowed_token_ids: Sequence[int] | None
    """The only tokens that may be generated."""
    no_repeat_ngram_size: int | None
    """No sequence of this many tokens may occur twice; 0: off."""
    beam_search: Mapping[str, Any] | None
    """Beam search in place of sampling, such as `{"width": 4}`; fields of sluice.v1.BeamSearch."""
    logits_processors: Sequence[str] | None
    """Names of the server's logits processors to apply, in this order."""

    max_tokens: int | None
    """Maximum number of tokens per output. Default: as many as fit into the model's context."""
    min_tokens: int | None
    """Minimum number of tokens per output."""
    stop: str | Sequence[str] | None
    """Texts that end an output."""
    stop_token_ids: Sequence[int] | None
    """Tokens that end an output, in addition to the model's EOS tokens."""
    ignore_eos: bool | None
    """Whether to continue after an EOS token."""
    include_stop_in_output: bool | None
    """Whether outputs include the stop string, or the text of the stop token, that ended them."""

    token_ids: bool | None
    """Whether to return token ids."""
    logprobs: int | None
    """Number of most likely tokens to return with the log-probability of each sampled token, from 0 to 20."""
    prompt_logprobs: int | None
    """The same for each token of the prompt."""
    echo: bool | None
    """Whether each output begins with the text of the prompt."""
    stream_interval: int | None
    """Minimum number of tokens per chunk."""
    skip_special_tokens: bool | None
    """Whether to omit special tokens from the text. Default: yes."""
    keep_special_tokens: list[str] | None
    """Special tokens that are shown even so, such as "<tool_call>"."""
    prompt_tail: int | None
    """Number of the prompt's last tokens whose text is returned, special tokens included, from 0 to 64."""
    timings: bool | None
    """Whether to return the durations of the request's phases."""
    context_logits: bool | None
    """Whether to return the logits of each prompt position, as the tensor "context_logits"."""
    generation_logits: bool | None
    """Whether to return the logits of each token, as the tensor "generation_logits"."""
    tensors: Sequence[Mapping[str, Any]] | None
    """Other tensors of the model to return, such as `{"name": "hidden_states"}`; fields of sluice.v1.TensorSpec."""

    tools_json: str | None
    """Tools that the model may call, as a JSON array in OpenAI's format; for chats only."""
    template_kwargs: Mapping[str, Any] | None
    """Variables of the chat template; for chats only."""
    continue_final_message: bool | None
    """Whether the output continues the last message; for chats only."""


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
