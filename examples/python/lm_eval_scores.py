"""lm-evaluation-harness with a Sluice server: `python lm_eval_scores.py TASK`. Requires the package lm-eval."""

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.api.model import LM

from sluice import Client

ADDRESS = "127.0.0.1:50051"


class SluiceLM(LM):
    """Scores texts by the log-probabilities of prompt tokens. Sends `concurrency` requests at a time."""

    def __init__(self, client: Client, prefix: int, max_context: int, concurrency: int = 32) -> None:
        """`prefix`: id of the token to put before a text without context, such as the model's EOS token."""
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._max_context = max_context
        self._concurrency = concurrency

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """For each (context, continuation): the log-likelihood, and whether it is the greedy continuation."""
        return self._map(lambda args: self._score(*self._pair(*args)), requests)

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """The log-likelihood of each text, in windows that do not overlap."""
        return self._map(lambda args: self._score_windows(self._ids(args[0])), requests)

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """The completion of each text."""
        return self._map(lambda args: self._complete(*args), requests)

    def _map(self, function: Callable[[Any], Any], requests: Sequence[Any]) -> list[Any]:
        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(function, [request.args for request in requests]))

    def _pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Token ids of both. Spaces between them go to the continuation, since tokens begin with spaces."""
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        both, context_ids = self._ids(context + continuation), self._ids(context) if context else []
        return (context_ids or [self._prefix]), both[len(context_ids) :]

    def _score_windows(self, ids: list[int]) -> float:
        size, total, previous = self._max_context - 2, 0.0, self._prefix
        for start in range(0, len(ids), size):
            window = ids[start : start + size]
            total += self._score([previous], window)[0]
            previous = window[-1]
        return total

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        # The request also generates one token, which must fit into the context.
        prompt = [*context, *continuation][-(self._max_context - 1) :]
        scored = self._client.generate(prompt, prompt_logprobs=1, max_tokens=1).prompt_logprobs[-len(continuation) :]
        total = sum(entry.logprob for entry in scored if entry.logprob is not None)
        return total, all(entry.top[0].token_id == entry.token_id for entry in scored)

    def _complete(self, context: str, options: dict[str, Any]) -> str:
        temperature = options.get("temperature", 0.0) if options.get("do_sample") else 0.0
        limit, stop = options.get("max_gen_toks", 256), options.get("until")
        return self._client.generate(context, stop=stop, max_tokens=limit, temperature=temperature).text

    def _ids(self, text: str) -> list[int]:
        return list(self._client.tokenize(text, add_special_tokens=False).token_ids)


if __name__ == "__main__":
    with Client(ADDRESS) as client:
        (served,) = client.models()
        model = SluiceLM(client, served.eos_token_ids[0], served.max_context_tokens)
        print(simple_evaluate(model, tasks=sys.argv[1:])["results"])
