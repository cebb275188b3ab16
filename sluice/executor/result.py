"""The result of one request, as it comes: a future, an iterator and an asynchronous iterator in one."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, Self, cast

from sluice.client import Timings, Usage
from sluice.executor.errors import RequestError
from sluice.executor.inbox import Ending, Inbox, News
from sluice.executor.request import GenerationRequest
from sluice.executor.response import CompletionOutput, Response, read_logprobs
from sluice.executor.times import Timeout, in_seconds
from sluice.executor.waiting import Deadline


class Submitter(Protocol):
    """What a result needs of the executor that submitted its request."""

    def tokenize(self, text: str, add_special_tokens: bool | None = None, model: str | None = None) -> list[int]:
        """Token ids of a text prompt."""

    def abort_request(self, request_id: int) -> None:
        """Stop the request."""

    def forget(self, request_id: int) -> None:
        """Drop the request from the set of unread ones."""


class GenerationResult:
    """What has been read of a request so far; each read takes all that has come and returns this same object.

    `outputs`, `done` and the rest change by reading only: `result`, `aresult`, iteration, or the executor's
    `await_responses`. Reads from several threads share what comes.
    """

    def __init__(self, request_id: int, request: GenerationRequest, inbox: Inbox, submitter: Submitter) -> None:
        self.request_id = request_id
        """Given by the executor, unique in it; no other request of it ever has the same."""
        self.request = request.with_id(request_id)
        self.outputs = [CompletionOutput(index) for index in range(max(1, request.sampling_params.n))]
        self.error: RequestError | None = None
        """Why it failed, once that has been read."""
        self.usage: Usage | None = None
        """Token counts over all outputs, once done."""
        self.timings: Timings | None = None
        self._inbox = inbox
        self._submitter = submitter
        self._done = False
        self._aborted = False
        self._failure_told = False
        self._prompt_token_ids: list[int] | None = None

    @property
    def client_id(self) -> int | None:
        """The request's."""
        return self.request.client_id

    @property
    def done(self) -> bool:
        """Whether the end has been read: the outputs are whole, or `error` is set."""
        return self._done

    @property
    def finished(self) -> bool:
        """`done`, by TensorRT-LLM's name."""
        return self._done

    @property
    def prompt(self) -> str | None:
        """The prompt, where it is a text."""
        return self.request.inputs if isinstance(self.request.inputs, str) else None

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt. For a text they are asked from the server, once, which takes a moment.

        Raises SluiceError; TypeError for a chat, of which only the server knows the template.
        """
        if self._prompt_token_ids is None:
            params, inputs = self.request.sampling_params, self.request.inputs
            if inputs and isinstance(inputs[0], Mapping):
                raise TypeError("the token ids of a chat are known to the server only")
            ids = (
                self._submitter.tokenize(inputs, params.add_special_tokens, self.request.model)
                if isinstance(inputs, str)
                else list(cast(Sequence[int], inputs))
            )
            self._prompt_token_ids = ids[-(params.truncate_prompt_tokens or 0) :]
        return self._prompt_token_ids

    def result(self, timeout: Timeout = None) -> Self:
        """Wait for the end. Raises TimeoutError, after which the request goes on; RequestError where it failed."""
        deadline = Deadline(timeout)
        while not self._done:
            try:
                self.read(deadline.left)
            except TimeoutError:
                raise self._not_within(timeout) from None
        return self._checked()

    async def aresult(self, timeout: Timeout = None) -> Self:
        """The same in an event loop."""
        try:
            async with asyncio.timeout(in_seconds(timeout)):
                while not self._done:
                    await self.aread()
        except TimeoutError:
            raise self._not_within(timeout) from None
        return self._checked()

    def __await__(self) -> Generator[Any, None, Self]:
        return self.aresult().__await__()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Self:
        if not self._done and self.read():
            return self._told()
        self._tell_failure()
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if not self._done and await self.aread():
            return self._told()
        self._tell_failure()
        raise StopAsyncIteration

    def abort(self) -> None:
        """Stop the request; it ends soon, with "cancelled" and what it has."""
        self._aborted = True
        self._submitter.abort_request(self.request_id)

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def read(self, timeout: Timeout = None) -> list[Response]:
        """Wait for news and take all of it, one response per output. Empty: the end was read before.

        Raises TimeoutError; never RequestError, which is in the response.
        """
        return self._inbox.take(self._apply, in_seconds(timeout))

    def read_within(self, deadline: Deadline) -> list[Response]:
        """The same; empty where nothing came until then, too."""
        try:
            return self.read(deadline.left)
        except TimeoutError:
            return []

    async def aread(self) -> list[Response]:
        """The same in an event loop, without a timeout."""
        return await self._inbox.atake(self._apply)

    def __repr__(self) -> str:
        return f"GenerationResult(request_id={self.request_id}, done={self._done}, outputs={self.outputs})"

    def _not_within(self, timeout: Timeout) -> TimeoutError:
        return TimeoutError(f"request {self.request_id} did not end within {in_seconds(timeout):g} s")

    def _checked(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    def _told(self) -> Self:
        self._tell_failure()
        return self

    def _tell_failure(self) -> None:
        """Whoever read it, an iteration raises it once before it ends."""
        if self.error is not None and not self._failure_told:
            self._failure_told = True
            raise self.error

    def _apply(self, news: News) -> list[Response]:
        for output in self.outputs:
            output.begin_read()
        touched = {chunk.index for chunk in news.chunks}
        for chunk in news.chunks:
            self.outputs[chunk.index].add(chunk, self.request.sampling_params.eos_id)
        if news.ending is None:
            return self._responses(touched, final=False)
        if (reason := news.ending.unfinished) is not None:
            touched |= {output.index for output in self.outputs if output.end(reason)}
        return self._end(news.ending, touched)

    def _end(self, ending: Ending, touched: set[int]) -> list[Response]:
        self._done = True
        self.usage, self.timings = ending.usage, ending.timings
        self._submitter.forget(self.request_id)
        if ending.error is not None:
            self.error = RequestError(self.request_id, self.client_id, ending.error)
            self.error.__cause__ = ending.error
            failed = Response(self.request_id, self.client_id, error=self.error)
            return [*self._responses(touched, final=False), failed]
        prompt_logprobs = read_logprobs(ending.prompt_logprobs)
        for output in self.outputs:
            output.prompt_logprobs = prompt_logprobs
        return self._responses(touched or {len(self.outputs) - 1}, final=True)

    def _responses(self, touched: set[int], final: bool) -> list[Response]:
        whole, last = self.request.return_all_generated_tokens, max(touched, default=0)
        return [
            Response(self.request_id, self.client_id, self.outputs[index].result(whole, final and index == last))
            for index in sorted(touched)
        ]
