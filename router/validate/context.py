"""Prompt and output must fit the context together: settled once the prompt's tokens are known."""

from router.errors import RequestError, Violation
from router.validate.spec import Spec
from sluice.ring.errors import ErrorCode


def fit(spec: Spec, prompt_tokens: int, context_tokens: int) -> int:
    """The request's max_tokens, at least 1; where the caller set none, what fits.

    Raises RequestError: INVALID_ARGUMENT for a prompt without tokens, CONTEXT_OVERFLOW with both numbers.
    """
    if prompt_tokens == 0:
        raise RequestError.invalid([Violation(spec.prompt.field, "has no tokens: a prompt has at least one")])
    room = context_tokens - prompt_tokens
    wanted = spec.stopping.max_tokens
    if room < 1:
        raise _overflow(
            spec.prompt.field,
            f"has {prompt_tokens} tokens, which leaves no room for a new one in a context of {context_tokens} tokens",
        )
    if wanted is not None and wanted > room:
        raise _overflow(
            "spec.stopping.max_tokens",
            f"is {wanted}, with {prompt_tokens} prompt tokens that is {prompt_tokens + wanted}, "
            f"more than the context of {context_tokens} tokens",
        )
    if spec.stopping.min_tokens > room:
        raise _overflow(
            "spec.stopping.min_tokens",
            f"is {spec.stopping.min_tokens}, but with {prompt_tokens} prompt tokens only {room} new ones fit "
            f"the context of {context_tokens} tokens",
        )
    for index, ids in spec.resume.items():
        if len(ids) > room:
            raise _overflow(
                "spec.resume",
                f"has {len(ids)} tokens of output {index}, but with {prompt_tokens} prompt tokens only {room} fit "
                f"the context of {context_tokens} tokens",
            )
    return wanted or room


def _overflow(field: str, description: str) -> RequestError:
    return RequestError.invalid([Violation(field, description)], ErrorCode.CONTEXT_OVERFLOW)
