"""Log-probabilities that a request asks for: of its tokens and of its prompt's."""

from router.errors import Range, RequestError, Violation, Violations
from router.validate.model import Limits, Model
from sluice.v1 import generation_pb2 as pb


def parse_logprobs(
    output: pb.OutputOptions, model: Model, limits: Limits, bad: Violations
) -> tuple[int | None, int | None]:
    """Alternatives to report with each new token, and with each of the prompt; None: no log-probabilities."""
    given = {
        "logprobs": output.logprobs if output.HasField("logprobs") else None,
        "prompt_logprobs": output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
    }
    for name, asked in given.items():
        if asked is not None:
            bad.within(f"spec.output.{name}", asked, Range(0, limits.logprobs))
            given[name] = min(asked, model.vocab_size)
    return given["logprobs"], given["prompt_logprobs"]


def check_prompt_logprobs(asked: int | None, prompt_tokens: int, limits: Limits) -> None:
    """Raises RequestError if there would be too many for one message."""
    if asked is None:
        return
    values = prompt_tokens * (1 + asked)
    if values > limits.prompt_logprobs:
        description = (
            f"is {asked}, with {prompt_tokens} prompt tokens that is {values} log-probabilities, "
            f"must be at most {limits.prompt_logprobs}"
        )
        raise RequestError.invalid([Violation("spec.output.prompt_logprobs", description)])
