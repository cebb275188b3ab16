"""The body of /v1/completions."""

from typing import Any

from gateway.errors import invalid
from gateway.requests import common
from gateway.requests.common import Common
from sluice.client import Prompt

REFUSED = (
    *common.REFUSED, "messages", "tools", "tool_choice", "top_logprobs", "reasoning_effort", "verbosity",
    "modalities", "chat_template_kwargs", "add_generation_prompt", "continue_final_message",
)  # fmt: skip
WITHOUT_MEANING = (*common.WITHOUT_MEANING, "parallel_tool_calls")
DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 256


class CompletionRequest(Common, kw_only=True):
    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None

    def prompts(self) -> list[Prompt]:
        """Raises ApiError."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        kinds = {type(item) for item in self.prompt}
        if len(kinds) != 1:
            raise invalid("must be text, token ids, or a non-empty list of either", "prompt")
        if kinds == {int}:
            return [self.prompt]  # type: ignore[list-item]
        if len(self.prompt) > MAX_PROMPTS:
            raise invalid(f"has {len(self.prompt)} prompts, at most {MAX_PROMPTS} are allowed", "prompt")
        return self.prompt  # type: ignore[return-value]

    def check(self) -> None:
        """Raises ApiError."""
        super().check()
        if self.prompt_logprobs is not None and self.streams:
            raise invalid("cannot be combined with stream: true", "prompt_logprobs")

    @property
    def prompt_top(self) -> int | None:
        """Number of log-probabilities to return for each token of the prompt; None for none at all."""
        echoed = self.logprobs if self.echo else None
        counts = [count for count in (echoed, self.prompt_logprobs) if count is not None]
        return max(counts) if counts else None

    @property
    def only_echoes(self) -> bool:
        """Whether the prompt and its log-probabilities are wanted, without any output."""
        return bool(self.echo) and self.asked_tokens == 0

    @property
    def asked_tokens(self) -> int:
        asked = super().asked_tokens
        return DEFAULT_MAX_TOKENS if asked is None else asked

    def params(self) -> dict[str, str]:
        logprobs = {"spec.output.prompt_logprobs": "logprobs"} if self.prompt_logprobs is None else {}
        return super().params() | logprobs

    def options(self) -> dict[str, Any]:
        options = {
            # The ring has no request without an output.
            "max_tokens": 1 if self.only_echoes else self.asked_tokens,
            "logprobs": self.logprobs,
            "echo": self.echo,
            "best_of": None if self.only_echoes or self.best_of == self.outputs else self.best_of,
            "prompt_logprobs": self.prompt_top,
        }
        return super().options() | {name: value for name, value in options.items() if value is not None}
