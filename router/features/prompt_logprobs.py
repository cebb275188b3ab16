"""Log-probabilities of the prompt's tokens."""

from dataclasses import dataclass
from typing import Any

from router.errors import RequestError, Violations
from router.parse.model import Limits, ServedModel
from router.parse.sampling import parse_count
from router.requests.part import Part
from router.requests.token_log import RequestLog
from sluice.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class PromptLogprobs:
    fields = frozenset({"output.prompt_logprobs"})

    _model: ServedModel
    _limits: Limits

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_PromptLogprobs | None":
        top = message.output.prompt_logprobs
        top = parse_count("spec.output.prompt_logprobs", top, self._model, self._limits, bad)
        # A caller that has tokens has received the prompt's log-probabilities before them.
        resumed = any(part.token_ids for part in message.resume)
        return None if resumed else _PromptLogprobs(top, self._limits.prompt_logprobs)


@dataclass(frozen=True, slots=True)
class _PromptLogprobs(Part):
    top: int
    """Alternatives per token."""
    limit: int
    """Log-probabilities that fit into one message."""

    def prepare(self, prompt_tokens: int, log: RequestLog) -> None:
        values = prompt_tokens * (1 + self.top)
        if values > self.limit:
            description = (
                f"is {self.top}, with {prompt_tokens} prompt tokens that is {values} log-probabilities, "
                f"must be at most {self.limit}"
            )
            raise RequestError.at("spec.output.prompt_logprobs", description)
        log.expect_prompt_logprobs(prompt_tokens - 1, self.top)

    def submitted(self, log: RequestLog) -> dict[str, Any]:
        # Complete once the first token has arrived, since all of a prompt's log-probabilities precede it.
        return {} if log.prompt_complete else {"prompt_logprobs": self.top}
