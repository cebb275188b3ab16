"""Generation as a library, modelled on TensorRT-LLM's executor."""

import asyncio
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, Self, Unpack, overload

from sluice.client import AsyncClient, ClientOptions, Prompt
from sluice.executor.batch import BatchRun, batch_requests, is_batch
from sluice.executor.callbacks import Callbacks, Processor
from sluice.executor.config import KvCacheConfig, PeftCacheConfig, SchedulerConfig, adapter_args
from sluice.executor.errors import either, values_of
from sluice.executor.kv_cache_events import KVCacheEvent
from sluice.executor.local import LocalRing
from sluice.executor.request import BatchOptions, GenerationRequest, RequestOptions
from sluice.executor.response import Response
from sluice.executor.result import GenerationResult
from sluice.executor.sampling import SamplingParams
from sluice.executor.session import Session
from sluice.executor.stats import IterationStats, RequestStats, read_request, read_step
from sluice.executor.submissions import Submissions
from sluice.executor.waiting import Deadline, Timeout, in_seconds
from sluice.launch.hosts import LOCAL

log = logging.getLogger("sluice.executor")

# Requests sent at once. Further ones wait here in order: a router would refuse them once its queue is full.
MAX_IN_FLIGHT = 1024
BATCH_IN_FLIGHT = 256
MAX_ITERATIONS = 1000
POLL_SECONDS = 0.05
"""Interval at which `aget_kv_cache_events` looks for events, which arrive in another event loop."""


class GenerationExecutor:
    """Runs requests on a ring on this machine or on a server elsewhere. Thread-safe.

    End it with `shutdown` or as a context manager. Garbage collection and the end of the program end it too.
    """

    def __init__(self, session: Session, ring: LocalRing | None = None, callbacks: Callbacks | None = None) -> None:
        self._session = session
        self._ring = ring
        self._submissions = Submissions(session)
        if ring is not None:
            ring.at_exit = session.close
        # The function must not refer to `self`, which would then never be garbage.
        self._end = weakref.finalize(self, _close, session, ring, callbacks)

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
        enable_lora: bool = False,
        peft_cache_config: PeftCacheConfig | None = None,
        iter_stats_max_iterations: int = MAX_ITERATIONS,
        max_in_flight: int = MAX_IN_FLIGHT,
        draft_model: str | None = None,
        logits_processors: Mapping[str, Processor | str] | None = None,
        logits_processor_batched: Processor | str | None = None,
        engine_args: dict[str, Any] | None = None,
        **ring_options: Any,
    ) -> Self:
        """Start a ring on this machine and wait until it is ready.

        `model` is a checkpoint folder or a hub id (None: the bundled tiny model), `revision` a branch, tag or commit.
        `num_postprocess_workers` is the number of detokenizers, `draft_model` a folder or hub id, see
        docs/speculation.md. `engine_args` are further settings of `engine_worker`, `ring_options` those of
        `sluice.launch.Ring`. Requests can use LoRA adapters with `enable_lora`, or a `peft_cache_config`. The newest
        `iter_stats_max_iterations` steps are kept for `get_latest_iteration_stats`. `logits_processors` are functions
        by the names that requests give, and `logits_processor_batched` one more, named "batched"; those that the engine
        cannot import are called in this program, see docs/processors.md. Raises CheckpointError, ValueError, TypeError,
        RingError.
        """
        callbacks = Callbacks()
        settings = {
            "max_batch_size": max_batch_size,
            "max_tokens_per_step": max_num_tokens,
            "chunked_context": enable_chunked_context,
            "draft_model": draft_model,
            **(kv_cache_config or KvCacheConfig()).engine_args(),
            **(scheduler_config or SchedulerConfig()).engine_args(),
            **adapter_args(enable_lora, peft_cache_config),
            **callbacks.settings(logits_processors, logits_processor_batched),
            **(engine_args or {}),
        }
        with ExitStack() as undo:
            undo.callback(callbacks.close)
            if callbacks.serves and ring_options.get("on", LOCAL) != LOCAL:
                raise ValueError("logits_processors: functions of this program need engines on this machine")
            ring = LocalRing(
                model,
                revision=revision,
                engines=engines,
                detokenizers=num_postprocess_workers,
                engine_args=settings,
                **ring_options,
            )
            undo.callback(ring.close)
            session = Session(ring.addresses, max_in_flight, iter_stats_max_iterations, ClientOptions(), is_own=True)
            created = cls(session, ring, callbacks)
            undo.pop_all()
        return created

    @classmethod
    def connect(
        cls,
        addresses: str | Sequence[str],
        *,
        iter_stats_max_iterations: int = MAX_ITERATIONS,
        max_in_flight: int = MAX_IN_FLIGHT,
        **client_options: Unpack[ClientOptions],
    ) -> Self:
        """Use a running server, such as `sluice serve`, by the address of one or several of its routers.

        `client_options` are those of `Client`. Raises SluiceError if no router answers.
        """
        return cls(Session(addresses, max_in_flight, iter_stats_max_iterations, client_options))

    def submit(self, request: GenerationRequest) -> GenerationResult:
        """Start a request. An invalid one fails by its result. Raises RuntimeError once shut down."""
        return self._submissions.submit(request, self)

    def generate_async(
        self,
        inputs: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Start generating for one prompt: text, token ids (or as `prompt_token_ids`) or a chat. Raises as `submit`."""
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
        """Generate for one prompt, or for a list of prompts with results in the same order, and wait for the end.

        A list runs `max_in_flight` requests at a time, shows its progress on stderr unless `use_tqdm` is false, and
        retries while the server is overloaded. `sampling_params`, `lora_request` and `kv_cache_retention_config` are
        either one for all prompts or one for each. Raises RequestError for the first request that fails, ValueError for
        lists of unequal length; any exception cancels the remaining requests.
        """
        given: Any = either("inputs", inputs, "prompt_token_ids", prompt_token_ids)
        single = not is_batch(given)
        prompts: Sequence[Any] = [given] if single else given
        requests = batch_requests(prompts, sampling_params or SamplingParams(), options)
        batch = BatchRun(partial(self._submissions.submit, submitter=self, patient=True), max_in_flight)
        try:
            batch.run(requests, show=use_tqdm and not single)
        except BaseException:
            self._submissions.cancel(batch.results)
            raise
        return batch.results[0] if single else batch.results

    def abort_request(self, request_id: int) -> None:
        """Stop a request. It ends shortly after with "cancelled" and the tokens so far; an ended one is unaffected."""
        self._submissions.abort(request_id)

    def enqueue_request(self, request: GenerationRequest) -> int:
        """Submit a request and return its id for `await_responses`."""
        return self.submit(request).request_id

    def enqueue_requests(self, requests: Sequence[GenerationRequest]) -> list[int]:
        return [self.enqueue_request(request) for request in requests]

    def can_enqueue_requests(self) -> bool:
        """False once `shutdown` was called."""
        return self._session.accepting

    cancel_request = abort_request

    @overload
    def await_responses(self, request_id: int | timedelta | None = None, timeout: Timeout = None) -> list[Response]: ...

    @overload
    def await_responses(self, request_id: Sequence[int], timeout: Timeout = None) -> list[list[Response]]: ...

    def await_responses(
        self, request_id: int | Sequence[int] | timedelta | None = None, timeout: Timeout = None
    ) -> list[Response] | list[list[Response]]:
        """Wait for responses of one request, of any request, or of each of several, and read them.

        Empty at the timeout (seconds, or a timedelta, which may be the only argument). Responses read here are applied
        to the request's `GenerationResult`. Raises ValueError for a request whose end has been read; RuntimeError once
        shut down and everything is read.
        """
        if isinstance(request_id, timedelta):
            if timeout is not None:
                raise TypeError("two timeouts: a timedelta as request_id is the timeout")
            request_id, timeout = None, request_id
        deadline = Deadline(timeout)
        ready = self._submissions.ready
        if request_id is None:
            return [response for _, responses in ready.read_any(deadline) for response in responses]
        if isinstance(request_id, int):
            return ready.find(request_id).read_within(deadline)
        return [result.read_within(deadline) for result in map(ready.find, request_id)]

    def read_any(self, timeout: Timeout = None) -> list[tuple[GenerationResult, list[Response]]]:
        """As `await_responses` of any request, with the results that the responses were applied to."""
        return self._submissions.ready.read_any(Deadline(timeout))

    def get_latest_iteration_stats(self, timeout: Timeout = 0.0) -> list[IterationStats]:
        """Steps of all engines since the last call, oldest first; waits up to `timeout` for the first.

        Engines report twice a second, and nothing while idle. Raises SluiceError if the server does not provide
        statistics; RuntimeError once shut down and everything is read.
        """
        return [read_step(stats) for stats in self._session.steps.take_steps(timeout)]

    get_latest_stats = get_latest_iteration_stats

    def get_latest_request_stats(self, timeout: Timeout = 0.0) -> list[RequestStats]:
        """The latest statistics of each request that changed since the last call; as `get_latest_iteration_stats`."""
        requests = self._session.steps.take_requests(timeout)
        return [read_request(stats, self._submissions.request_id(stats.request_id)) for stats in requests]

    def get_kv_cache_events(self, timeout: Timeout = 0.0) -> list[KVCacheEvent]:
        """KV cache events of all engines since the last call, oldest first; waits up to `timeout` for the first.

        The first call begins with the oldest events that engines keep (`KvCacheConfig.event_buffer_max_size`). Raises
        SluiceError if the server keeps no events; RuntimeError once shut down and everything is read.
        """
        self.follow_kv_cache_events()
        return self._session.cache_events.take(timeout)

    async def aget_kv_cache_events(self, timeout: Timeout = 0.0) -> list[KVCacheEvent]:
        """As `get_kv_cache_events`, in any event loop."""
        deadline = Deadline(timeout)
        while not (events := self.get_kv_cache_events(0)) and deadline.left != 0:
            await asyncio.sleep(min(POLL_SECONDS, deadline.slice))
        return events

    def follow_kv_cache_events(self) -> None:
        """Begin to receive events, as the first `get_kv_cache_events` does."""
        self._session.follow_cache()

    @property
    def latest_iteration(self) -> int:
        """Number of the newest step that an engine has reported; 0 before the first."""
        return self._session.steps.latest_iteration

    @property
    def tokens_per_block(self) -> int:
        """Of the engines' KV caches, once a step was reported; 1 before."""
        return self._session.steps.tokens_per_block

    def tokenize(self, text: str, add_special_tokens: bool | None = None, model: str | None = None) -> list[int]:
        """Token ids of a text, as the server would tokenize it as a prompt. Raises SluiceError."""
        ask = partial(AsyncClient.tokenize, text=text, model=model or "", add_special_tokens=add_special_tokens)
        return list(self._session.run(ask).token_ids)

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run a named method on every rank of every engine; its values, by engine id, then rank. Raises
        CollectiveRpcError if a rank failed. See `Client.call_engines`."""
        call = partial(AsyncClient.call_engines, method=method, args=args, kwargs=kwargs, ranks=ranks, timeout=timeout)
        return values_of(self._session.run(call))

    def forget(self, request_id: int) -> None:
        """Discard the unread responses of a request. Results do this when their end is read."""
        self._submissions.ready.forget(request_id)

    def shutdown(self, *, abort: bool = False, timeout: Timeout = None) -> None:
        """Accept no more requests, wait for the submitted ones, then close the connection and stop the executor's ring.

        With `abort`, at the timeout (seconds or a timedelta) and on Ctrl-C, running requests are aborted: their results
        raise RequestError. Idempotent. Raises ValueError for a timeout together with `abort`.
        """
        if abort and timeout is not None:
            raise ValueError("shutdown(abort=True) does not wait, so it takes no timeout")
        try:
            if not abort and not self._session.finish(timeout):
                log.warning("shutdown: requests did not end within %g s and are aborted", in_seconds(timeout))
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._end()
        finally:
            self._submissions.ready.close()
            self._session.steps.close()
            self._session.cache_events.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the executor's ring by service; empty for a server elsewhere."""
        return self._ring.pids if self._ring else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(abort=kind is not None)


def _close(session: Session, ring: LocalRing | None, callbacks: Callbacks | None) -> None:
    with ExitStack() as stack:
        if callbacks is not None:
            stack.callback(callbacks.close)
        if ring is not None:
            stack.callback(ring.close)
        session.close()
