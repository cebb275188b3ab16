"""A validated request, and whether it fits into the context."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.errors import Reason, RequestError, Violation
from router.parse.prompt import Prompt
from router.parse.sampling import Stopping
from sluice.wire.errors import ErrorCode
from sluice.wire.params import SamplingParams, TextParams


@dataclass(frozen=True, slots=True)
class Spec:
    """A request whose fields are all set and in range. The prompt is not tokenized yet."""

    request_id: str
    prompt: Prompt
    keep_prompt_tokens: int | None
    """Truncate the prompt to this many of its last tokens; None to keep all of them."""
    sampling: SamplingParams
    """Does not yet include what features add, such as bad words, which are not tokenized yet."""
    stopping: Stopping
    text: TextParams
    n: int
    """Number of sequences to generate."""
    num_outputs: int
    """Number of sequences to return: the most likely ones if fewer than `n`."""
    logprobs: int | None
    """Alternatives to return with each output token; None to return no logprobs."""
    priority: int
    """1 low, 2 normal, 3 high."""
    salt: str
    """Salt of the prefix cache."""
    time_limit: float | None
    """Seconds from the request's arrival."""
    token_ids: bool
    echo: bool
    prompt_tail: int
    """Number of the prompt's last tokens whose text is returned."""
    timings: bool
    streaming: bool
    resume: Mapping[int, tuple[int, ...]]
    """Tokens that the caller already has, by output index."""
    resume_model: str
    """Fingerprint of the model that generated the `resume` tokens; empty if unknown."""
    client_id: int | None
    """Passed to logits processors."""
    engine_deaths: int = 0
    """Successive engine deaths under this request, as reported by other routers."""

    @property
    def sequences(self) -> int:
        """Number of sequences that an engine runs for the request at the same time."""
        return self.n if self.sampling.beam_search is None else self.sampling.beam_search.width

    @property
    def resumed_tokens(self) -> int:
        """Number of resumed tokens of all outputs. The engine computes them again."""
        return sum(map(len, self.resume.values()))

    def echoes(self, index: int) -> bool:
        """Whether this output begins with the prompt's text. A resumed stream has sent it already."""
        return self.echo and index not in self.resume and not any(self.resume.values())


def fit(spec: Spec, prompt_tokens: int, context_tokens: int, model_tokens: int) -> int:
    """The request's max_tokens, at least 1. If the caller has not set it, as many as fit into the context.

    `context_tokens`: maximum number of tokens of prompt plus output. `model_tokens`: the model's own limit.
    Raises RequestError: INVALID_ARGUMENT for a prompt without tokens, CONTEXT_OVERFLOW if the request does not fit.
    """
    if prompt_tokens == 0:
        raise RequestError.at(spec.prompt.field, "has no tokens, must have at least one", reason=Reason.MISSING)
    room = context_tokens - prompt_tokens
    max_tokens = spec.stopping.max_tokens
    with_prompt = f"with {prompt_tokens} prompt tokens"
    context = f"the context of {context_tokens} tokens"
    if context_tokens < model_tokens:
        context += f" that the engines accept (the model's is {model_tokens})"
    if room < 1:
        problem = f"has {prompt_tokens} tokens, which leaves no room in {context}"
        raise _overflow(spec.prompt.field, problem, context_tokens, prompt_tokens, max_tokens or 0)
    if max_tokens is not None and max_tokens > room:
        total = prompt_tokens + max_tokens
        problem = f"is {max_tokens}, {with_prompt} that is {total}, more than {context}"
        raise _overflow("spec.stopping.max_tokens", problem, context_tokens, prompt_tokens, max_tokens)
    if spec.stopping.min_tokens > room:
        min_tokens = spec.stopping.min_tokens
        problem = f"is {min_tokens}, but {with_prompt} only {room} fit {context}"
        raise _overflow("spec.stopping.min_tokens", problem, context_tokens, prompt_tokens, min_tokens)
    for index, ids in spec.resume.items():
        if len(ids) > room:
            problem = f"has {len(ids)} tokens of output {index}, but {with_prompt} only {room} fit {context}"
            raise _overflow("spec.resume", problem, context_tokens, prompt_tokens, len(ids))
    return max_tokens or room


def _overflow(
    field: str, description: str, context_tokens: int, prompt_tokens: int, output_tokens: int
) -> RequestError:
    """`output_tokens`: as many as the request asks for; 0 if it leaves their number to the server."""
    violation = Violation(field, description, reason=Reason.TOO_MANY)
    numbers = {"context_tokens": context_tokens, "prompt_tokens": prompt_tokens, "output_tokens": output_tokens}
    metadata = {name: str(number) for name, number in numbers.items()}
    return RequestError.invalid([violation], ErrorCode.CONTEXT_OVERFLOW, metadata)
