"""A validated request."""

from collections.abc import Mapping
from dataclasses import dataclass

from router.parse.prompt import Prompt, Retention
from router.parse.sampling import Stopping
from sluice.wire.params import SamplingParams, TextParams


@dataclass(frozen=True, slots=True)
class Spec:
    """A request whose fields are all set and in range. The prompt is not tokenized yet."""

    request_id: str
    prompt: Prompt
    keep_prompt_tokens: int | None
    """Truncate the prompt to its last tokens, this many; None to keep all of them."""
    retention: Retention | None
    """None: the default."""
    sampling: SamplingParams
    """Does not include bad words, which are not tokenized yet."""
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
