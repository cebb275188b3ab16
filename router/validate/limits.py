"""The bounds of one request, as far as they are no settings: each is larger than any use we know of."""

from dataclasses import dataclass

from sluice.settings.router import ClientLimits

PROMPT_BYTES_PER_TOKEN = 32
SMALLEST_PROMPT_BYTES = 64 << 10
LARGEST_PROMPT_BYTES = 8 << 20
SMALLEST_PROMPT_IDS = 1 << 16
"""Accepted even for a short context: truncate_prompt_tokens may cut them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest values of the fields of one request."""

    prompt_bytes: int
    prompt_ids: int
    n: int = 128
    logprobs: int = 20
    """Alternatives per token. The engine has no more, see `sluice.ring.bounds`."""
    stop_strings: int = 32
    """The detokenizer looks for each of them in every new text."""
    stop_bytes: int = 1024
    """Of one stop string: so much text may be held back."""
    logit_bias: int = 1024
    guide_bytes: int = 65_536
    """Of a regex, schema or grammar, or of all choices together."""
    listed_ids: int = 16_384
    """In bad, allowed or stop_token_ids."""
    messages: int = 4096
    """Of a chat."""
    salt_bytes: int = 256
    """Of kv_cache.salt."""
    retention_ranges: int = 64
    """In kv_cache.prompt_retention."""
    retention_time: float = 30 * 86_400.0
    """Seconds, of any duration in kv_cache."""
    time_limit: float = 86_400.0
    """Seconds."""


def limits_of(settings: ClientLimits, context_tokens: int) -> Limits:
    """For a model with this longest context."""
    by_context = min(max(context_tokens * PROMPT_BYTES_PER_TOKEN, SMALLEST_PROMPT_BYTES), LARGEST_PROMPT_BYTES)
    return Limits(settings.max_prompt_bytes or by_context, max(4 * context_tokens, SMALLEST_PROMPT_IDS), settings.max_n)
