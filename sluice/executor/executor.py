"""Generation as a library, after TensorRT-LLM's executor."""

import itertools
import logging
import uuid
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack, overload

from sluice.client import AsyncClient, ClientOptions, Prompt
from sluice.executor.batch import Batch, batch_requests, is_batch
from sluice.executor.call import Call
from sluice.executor.config import KvCacheConfig, SchedulerConfig
from sluice.executor.inbox import Inbox
from sluice.executor.local import LocalRing
from sluice.executor.names import either
from sluice.executor.ready_set import ReadySet
from sluice.executor.request import BatchOptions, GenerationRequest, RequestOptions
from sluice.executor.response import Response
from sluice.executor.result import GenerationResult
from sluice.executor.sampling import SamplingParams
from sluice.executor.session import Session
from sluice.executor.stats import IterationStats, RequestStats, read_request, read_step
from sluice.executor.steps import StepsLog
from sluice.executor.times import Timeout, in_seconds
from sluice.executor.waiting import Deadline

LOGGER = logging.getLogger("sluice.executor")

MAX_IN_FLIGHT = 1024
"""Requests on the way at once; others wait here, in order."""
BATCH_IN_FLIGHT = 256
MAX_ITERATIONS = 1000


class GenerationExecutor:
    """Takes requests and gives results, through a ring on this machine or a server elsewhere. For any thread.

    Make it with `create` or `connect`, and end it with `shutdown` or as a context manager; leaving it to the garbage
    collector or to the end of the program ends it too.
    """

    def __init__(self, session: Session, steps: StepsLog, ring: LocalRing | None = None) -> None:
        self._session = session
        self._steps = steps
        self._ring = ring
        self._unread = ReadySet()
        self._ids = itertools.count(1)
        self._name = uuid.uuid4().hex[:12]
        self._end = weakref.finalize(self, _close, session, ring)

    @classmethod
    def create(
        cls,
        model: str | None = None,
        *,
        revision: str | None = None,
        num_postprocess_workers: int = 2,
        engines: int = 1,
        max_batch_size: int | None = None,
        max_num_tokens: int | None = None,
        enable_chunked_context: bool | None = None,
        kv_cache_config: KvCacheConfig | None = None,
        scheduler_config: SchedulerConfig | None = None,
        iter_stats_max_iterations: int = MAX_ITERATIONS,
        max_in_flight: int = MAX_IN_FLIGHT,
        engine_args: dict[str, Any] | None = None,
        **ring_options: Any,
    ) -> Self:
        """Start a ring on this machine and wait until it serves.

        `model` is a checkpoint folder or a hub id; None is the tiny model in the box. `revision` is a branch, tag or
        commit of a hub id. `num_postprocess_workers` are its detokenizers. `engine_args` are further settings of
        `engine_worker`; `ring_options` those of `sluice.launch.Ring`, such as `name`, `start_timeout`, `router_args`.
        The newest `iter_stats_max_iterations` steps are kept for `get_latest_iteration_stats`; 0: none. Raises
        CheckpointError, ValueError, TypeError, RingError.
        """
        settings = {
            "max_batch_size": max_batch_size,
            "max_tokens_per_step": max_num_tokens,
            "chunked_context": enable_chunked_context,
            **(kv_cache_config or KvCacheConfig()).engine_args(),
            **(scheduler_config or SchedulerConfig()).engine_args(),
            **(engine_args or {}),
        }
        ring = LocalRing(
            model,
            revision=revision,
            engines=engines,
            detokenizers=num_postprocess_workers,
            engine_args=settings,
            **ring_options,
        )
        try:
            return cls._over(ring.addresses, iter_stats_max_iterations, max_in_flight, ring, ClientOptions())
        except BaseException:
            ring.close()
            raise

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        iter_stats_max_iterations: int = MAX_ITERATIONS,
        max_in_flight: int = MAX_IN_FLIGHT,
        **client_options: Unpack[ClientOptions],
    ) -> Self:
        """Use a server that runs, such as `sluice serve`, through one router of it or several.

        `client_options` are those of `sluice.client`. Raises SluiceError where none answers.
        """
        return cls._over(addresses, iter_stats_max_iterations, max_in_flight, None, client_options)

    @classmethod
    def _over(
        cls,
        addresses: str | Sequence[str],
        iterations: int,
        max_in_flight: int,
        ring: LocalRing | None,
        client_options: ClientOptions,
    ) -> Self:
        steps = StepsLog(iterations)
        return cls(Session(addresses, max_in_flight, steps, client_options), steps, ring)

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Start a request. What is wrong with it comes with its result. Raises RuntimeError once shut down."""
        return self._submit(request)

    def generate_async(
        self,
        inputs: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Start to generate for one prompt: text, token ids, or the messages of a chat. Raises as `submit`.

        `prompt_token_ids` is TensorRT-LLM's name for `inputs`.
        """
        prompt: Prompt = either("inputs", inputs, "prompt_token_ids", prompt_token_ids)
        request = GenerationRequest(prompt, sampling_params or SamplingParams(), streaming, **options)
        return self.submit(request)

    @overload
    def generate(
        self,
        inputs: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        use_tqdm: bool = True,
        max_in_flight: int = BATCH_IN_FLIGHT,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult: ...

    @overload
    def generate(
        self,
        inputs: Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        max_in_flight: int = BATCH_IN_FLIGHT,
        **options: Unpack[BatchOptions],
    ) -> list[GenerationResult]: ...

    def generate(
        self,
        inputs: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        max_in_flight: int = BATCH_IN_FLIGHT,
        **options: Any,
    ) -> GenerationResult | list[GenerationResult]:
        """Generate for one prompt, or for a list of them with results in its order, and wait for the end.

        A list runs `max_in_flight` requests at a time, whatever its length, and shows its progress on stderr unless
        `use_tqdm` is false; an overloaded server is asked again when it says so. `sampling_params`, `lora_request` and
        `kv_cache_retention_config` are one for all prompts or one for each. Raises RequestError for the first request
        that fails, ValueError for lists of unequal length; whatever is raised, nothing goes on.
        """
        given: Any = either("inputs", inputs, "prompt_token_ids", prompt_token_ids)
        single = not is_batch(given)
        prompts: Sequence[Any] = [given] if single else given
        requests = batch_requests(prompts, sampling_params or SamplingParams(), options)
        batch = Batch(partial(self._submit, patient=True), max_in_flight)
        try:
            batch.run(requests, show=use_tqdm and not single)
        except BaseException:
            self._drop(batch.results)
            raise
        return batch.results[0] if single else batch.results

    def abort_request(self, request_id: int) -> None:
        """Stop a request; it ends soon, with "cancelled" and what it has. Nothing happens to one that has ended."""
        self._session.abort(self._wire_id(request_id))

    def enqueue_request(self, request: GenerationRequest) -> int:
        """`submit`, for the id alone: `await_responses` has the result."""
        return self.submit(request).request_id

    def enqueue_requests(self, requests: Sequence[GenerationRequest]) -> list[int]:
        """The same for several, in order."""
        return [self.enqueue_request(request) for request in requests]

    def can_enqueue_requests(self) -> bool:
        """Whether requests are accepted: until `shutdown`."""
        return self._session.accepting

    cancel_request = abort_request

    @overload
    def await_responses(self, request_id: int | timedelta | None = None, timeout: Timeout = None) -> list[Response]: ...

    @overload
    def await_responses(self, request_id: Sequence[int], timeout: Timeout = None) -> list[list[Response]]: ...

    def await_responses(
        self, request_id: int | Sequence[int] | timedelta | None = None, timeout: Timeout = None
    ) -> list[Response] | list[list[Response]]:
        """Wait for news of one request, of any of them, or of each of several, and take it.

        Empty where nothing came within the timeout (seconds or a timedelta, which may stand alone). What is taken here
        counts as read by the request's `GenerationResult` too. Raises ValueError for a request whose end has been read;
        RuntimeError once shut down, if there is nothing left to read of any.
        """
        if isinstance(request_id, timedelta):
            if timeout is not None:
                raise TypeError("two timeouts: a timedelta in the place of request_id is the timeout")
            request_id, timeout = None, request_id
        deadline = Deadline(timeout)
        if request_id is None:
            return self._unread.read_any(deadline)
        if isinstance(request_id, int):
            return self._unread.find(request_id).read_within(deadline)
        return [result.read_within(deadline) for result in map(self._unread.find, request_id)]

    def get_latest_iteration_stats(self, timeout: Timeout = 0.0) -> list[IterationStats]:
        """Steps of all engines since the last call, oldest first; waits so long for the first.

        Engines report twice a second and nothing while idle. Raises SluiceError where the server cannot tell;
        RuntimeError once shut down, if there is nothing left.
        """
        return [read_step(stats) for stats in self._steps.take_steps(timeout)]

    get_latest_stats = get_latest_iteration_stats

    def get_latest_request_stats(self, timeout: Timeout = 0.0) -> list[RequestStats]:
        """The latest of each request that changed since the last call; otherwise as `get_latest_iteration_stats`."""
        return [read_request(stats, self._request_id(stats.request_id)) for stats in self._steps.take_requests(timeout)]

    def tokenize(self, text: str, add_special_tokens: bool | None = None, model: str | None = None) -> list[int]:
        """Token ids of a text, as the server sees it as a prompt. Raises SluiceError."""
        ask = partial(AsyncClient.tokenize, text=text, model=model or "", add_special_tokens=add_special_tokens)
        return list(self._session.run(ask).token_ids)

    def forget(self, request_id: int) -> None:
        """Keep nothing of a request any more; results do this when their end is read."""
        self._unread.forget(request_id)

    def shutdown(self, *, abort: bool = False, timeout: Timeout = None) -> None:
        """Accept no more requests, wait until those submitted have ended, then close the connection and the own ring.

        With `abort`, after the timeout (seconds or a timedelta) and on Ctrl-C, requests that still run are aborted:
        their results raise RequestError. Idempotent. Raises ValueError for a timeout together with `abort`.
        """
        if abort and timeout is not None:
            raise ValueError("shutdown(abort=True) does not wait: it has no timeout")
        try:
            if not abort and not self._session.finish(timeout):
                LOGGER.warning("shutdown: requests did not end within %g s and are aborted", in_seconds(timeout))
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._end()
        finally:
            self._unread.close()
            self._steps.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of our own ring by service; empty where it is not ours."""
        return self._ring.pids if self._ring else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown(abort=kind is not None)

    def _submit(
        self,
        request: GenerationRequest,
        ended: Callable[[GenerationResult], None] | None = None,
        patient: bool = False,
    ) -> GenerationResult:
        request_id = next(self._ids)
        inbox = Inbox(partial(self._unread.mark, request_id))
        result = GenerationResult(request_id, request, inbox, self)
        self._unread.add(result)
        call = Call(self._wire_id(request_id), request, inbox, patient, partial(ended, result) if ended else None)
        try:
            self._session.submit(call)
        except BaseException:
            self._unread.forget(request_id)
            raise
        return result

    def _drop(self, results: list[GenerationResult]) -> None:
        self._session.cancel([self._wire_id(result.request_id) for result in results if not result.done])
        for result in results:
            self._unread.forget(result.request_id)

    def _wire_id(self, request_id: int) -> str:
        return f"{self._name}-{request_id}"

    def _request_id(self, wire_id: str) -> int | None:
        name, _, number = wire_id.rpartition("-")
        return int(number) if name == self._name else None


def _close(session: Session, ring: LocalRing | None) -> None:
    try:
        session.close()
    finally:
        if ring is not None:
            ring.close()
