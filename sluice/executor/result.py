"""The result of one request as it arrives: a future, an iterator and an asynchronous iterator in one."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from typing import Any, Protocol, Self, cast

from msgspec import structs

from sluice.client import Timings, Usage
from sluice.executor.chunk_queue import ChunkQueue, Ending, Unread
from sluice.executor.errors import RequestError
from sluice.executor.request import GenerationRequest
from sluice.executor.response import CONTEXT_LOGITS, CompletionOutput, Response, read_logprobs
from sluice.executor.stats import ReportedRequest, read_request
from sluice.executor.waiting import Deadline, Timeout, in_seconds


# A protocol, because GenerationExecutor imports this file. A result refers to its executor and so keeps it alive.
class Submitter(Protocol):
    """The methods of `GenerationExecutor` that results call."""

    def tokenize(self, text: str, add_special_tokens: bool | None = None, model: str | None = None) -> list[int]: ...
    def abort_request(self, request_id: int) -> None: ...
    def forget(self, request_id: int) -> None: ...


class GenerationResult:
    """The result of one request: wait for it with `result`, `await` it, or iterate over it as it arrives.

    `outputs` holds everything that has been read so far, by these or by the executor's `await_responses`. Each read
    applies all that was received, and returns this same object. With several readers, each response goes to one of
    them.
    """

    def __init__(self, request_id: int, request: GenerationRequest, queue: ChunkQueue, submitter: Submitter) -> None:
        self.request_id = request_id
        """Unique within the executor."""
        self.request = request.with_id(request_id)
        """The request, with its `id`."""
        self.outputs = [CompletionOutput(index) for index in range(max(1, request.sampling_params.n))]
        """The n outputs as read so far."""
        self.error: RequestError | None = None
        """Why the request failed; set when the failure is read."""
        self.usage: Usage | None = None
        """Token counts over all outputs; set once `done`."""
        self.timings: Timings | None = None
        """The server's timings of the request; set once `done`."""
        self.stats: ReportedRequest | None = None
        """The engine's statistics of the request, if requested by `return_perf_metrics`: set from the first response
        on, and final once `done`. None if the engine died before it reported them."""
        self.adapter_refused = False
        """Whether the request failed because its adapters could not be loaded, and another try would fail too."""
        self._queue = queue
        self._submitter = submitter
        self._done = False
        self._aborted = False
        self._error_raised = False
        self._prompt_token_ids: list[int] | None = None

    @property
    def client_id(self) -> int | None:
        return self.request.client_id

    @property
    def done(self) -> bool:
        """Whether the end has been read: the outputs are complete, or `error` is set."""
        return self._done

    @property
    def finished(self) -> bool:
        """TensorRT-LLM's name for `done`."""
        return self._done

    @property
    def text(self) -> str:
        """The text so far of the only output. Raises AttributeError if there are several."""
        return self._only_output("text").text

    @property
    def text_diff(self) -> str:
        """What the latest read added to the text of the only output. Raises AttributeError if there are several."""
        return self._only_output("text_diff").text_diff

    @property
    def prompt(self) -> str | None:
        """The prompt's text; None unless the prompt is text."""
        return self.request.inputs if isinstance(self.request.inputs, str) else None

    @property
    def prompt_token_ids(self) -> list[int]:
        """Token ids of the prompt. The first access for a text prompt calls the server.

        Raises SluiceError if that call fails; TypeError for a chat or for embeddings.
        """
        if self._prompt_token_ids is None:
            params, inputs = self.request.sampling_params, self.request.inputs
            if isinstance(inputs, Mapping):
                raise TypeError("prompt_token_ids: a prompt of embeddings has no token ids")
            if inputs and isinstance(inputs[0], Mapping):
                raise TypeError("prompt_token_ids: only the server knows the token ids of a chat")
            ids = (
                self._submitter.tokenize(inputs, params.add_special_tokens, self.request.model)
                if isinstance(inputs, str)
                else list(cast(Sequence[int], inputs))
            )
            self._prompt_token_ids = ids[-(params.truncate_prompt_tokens or 0) :]
        return self._prompt_token_ids

    @property
    def context_logits(self) -> Any:
        """Logits of the prompt as read so far, a numpy array [prompt tokens, vocabulary]; None if none were read.

        Requested with `SamplingParams.return_context_logits`.
        """
        return self.outputs[0].tensor(CONTEXT_LOGITS, context=True)

    def result(self, timeout: Timeout = None) -> Self:
        """Wait for the request to end, and return this object.

        Raises RequestError if the request failed; TimeoutError after `timeout` (seconds or a timedelta), which does not
        stop the request.
        """
        deadline = Deadline(timeout)
        while not self._done:
            try:
                self.read(deadline.left)
            except TimeoutError:
                raise self._not_within(timeout) from None
        return self._checked()

    async def aresult(self, timeout: Timeout = None) -> Self:
        """Like `result`, without blocking the event loop. `await result` is the same without a timeout."""
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
            return self._after_read()
        self._raise_error_once()
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Self:
        if not self._done and await self.aread():
            return self._after_read()
        self._raise_error_once()
        raise StopAsyncIteration

    def abort(self) -> None:
        """Stop the request. It ends shortly after with finish reason "cancelled" and the tokens so far."""
        self._aborted = True
        self._submitter.abort_request(self.request_id)

    def aborted(self) -> bool:
        """Whether `abort` was called."""
        return self._aborted

    def read(self, timeout: Timeout = None) -> list[Response]:
        """Wait until something was received, apply it, and return it as one response per output.

        Returns an empty list if the end has been read before. Raises TimeoutError after `timeout` (seconds or a
        timedelta). Does not raise RequestError: the response of a failed request carries it.
        """
        return self._queue.read(self._apply, in_seconds(timeout))

    def read_within(self, deadline: Deadline) -> list[Response]:
        """Like `read`, but returns an empty list at the deadline."""
        try:
            return self.read(deadline.left)
        except TimeoutError:
            return []

    def unread(self) -> Unread:
        """Everything that was received but not read yet. It stays unread."""
        return self._queue.peek()

    async def aread(self) -> list[Response]:
        """Like `read`, without blocking the event loop, and without a timeout."""
        return await self._queue.aread(self._apply)

    def __repr__(self) -> str:
        return f"GenerationResult(request_id={self.request_id}, done={self._done}, outputs={self.outputs})"

    def _only_output(self, name: str) -> CompletionOutput:
        if len(self.outputs) > 1:
            raise AttributeError(f"a result of {len(self.outputs)} outputs has no {name}: use outputs[i].{name}")
        return self.outputs[0]

    def _not_within(self, timeout: Timeout) -> TimeoutError:
        return TimeoutError(f"request {self.request_id} did not end within {in_seconds(timeout):g} s")

    def _checked(self) -> Self:
        if self.error is not None:
            raise self.error
        return self

    def _after_read(self) -> Self:
        self._raise_error_once()
        return self

    def _raise_error_once(self) -> None:
        # Iteration raises the error once before it ends, even if another reader has read it.
        if self.error is not None and not self._error_raised:
            self._error_raised = True
            raise self.error

    def _apply(self, unread: Unread) -> list[Response]:
        for output in self.outputs:
            output.begin_read()
        if unread.stats is not None:
            self.stats = read_request(unread.stats, self.request_id)
        touched = {chunk.index for chunk in unread.chunks}
        params = self.request.sampling_params
        for chunk in unread.chunks:
            added = chunk if params.detokenize else structs.replace(chunk, text="")
            self.outputs[chunk.index].add(added, params.eos_id)
        if unread.ending is None:
            return self._responses(touched, final=False)
        if (reason := unread.ending.unfinished) is not None:
            touched |= {output.index for output in self.outputs if output.end(reason)}
        return self._end(unread.ending, touched)

    def _end(self, ending: Ending, touched: set[int]) -> list[Response]:
        self._done = True
        self.usage, self.timings = ending.usage, ending.timings
        self.adapter_refused = ending.refused_adapter
        self._submitter.forget(self.request_id)
        if ending.error is not None:
            self.error = RequestError(self.request_id, self.client_id, ending.error)
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
