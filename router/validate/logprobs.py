"""The log-probabilities that a request asks for: of its output tokens and of its prompt."""

from router.errors import RequestError, Violation, Violations
from router.validate.model import Limits, Model
from sluice.v1 import generation_pb2 as pb
from sluice.wire.sampling_ranges import Range


def parse_logprobs(
    output: pb.OutputOptions, model: Model, limits: Limits, bad: Violations
) -> tuple[int | None, int | None]:
    """(alternatives per output token, alternatives per prompt token); None where no log-probabilities are requested."""
    counts = {
        "logprobs": output.logprobs if output.HasField("logprobs") else None,
        "prompt_logprobs": output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
    }
    for name, count in counts.items():
        if count is not None:
            bad.within(f"spec.output.{name}", count, Range(0, limits.logprobs))
            counts[name] = min(count, model.vocab_size)
    return counts["logprobs"], counts["prompt_logprobs"]


def check_prompt_logprobs(top: int | None, prompt_tokens: int, limits: Limits) -> None:
    """Raises RequestError if there would be too many for one message. `top`: alternatives per token."""
    if top is None:
        return
    values = prompt_tokens * (1 + top)
    if values > limits.prompt_logprobs:
        description = (
            f"is {top}, with {prompt_tokens} prompt tokens that is {values} log-probabilities, "
            f"must be at most {limits.prompt_logprobs}"
        )
        raise RequestError.invalid([Violation("spec.output.prompt_logprobs", description)])
