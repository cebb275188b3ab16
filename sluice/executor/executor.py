"""`GenerationExecutor`: generation as a library, modelled on TensorRT-LLM's executor."""

import asyncio
import logging
import weakref
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from inspect import signature
from typing import Any, Self, Unpack, overload

from sluice.client import AsyncClient, ClientOptions, Prompt
from sluice.executor.batch import BatchRun, batch_requests, is_batch
from sluice.executor.callbacks import Callbacks, Processor
from sluice.executor.config import KvCacheConfig, PeftCacheConfig, SchedulerConfig, adapter_args
from sluice.executor.errors import either, values_of
from sluice.executor.forks import Creator
from sluice.executor.kv_cache_events import KVCacheEvent
from sluice.executor.local import LocalRing
from sluice.executor.request import BatchOptions, GenerationRequest, RequestOptions
from sluice.executor.request_queue import RequestQueue
from sluice.executor.result import GenerationResult
from sluice.executor.sampling import SamplingParams
from sluice.executor.session import Session
from sluice.executor.stats import ReportedRequest, ReportedStep, read_request, read_step
from sluice.executor.waiting import Deadline, Timeout, in_seconds
from sluice.launch.hosts import LOCAL
from sluice.launch.options import RING_OPTIONS, check_ring_options

log = logging.getLogger("sluice.executor")

MAX_IN_FLIGHT = 1024
"""Requests sent to the server at a time. The rest wait here in order, since a router rejects requests when its queue
is full."""
BATCH_IN_FLIGHT = 256
"""Requests of one `generate` call sent at a time."""
RENAMED = {"detokenizers": "'num_postprocess_workers'", "engine_dir": "'model', the folder of a checkpoint"}
"""What to write in place of options of `Ring` that have another name here."""
OWN_OPTIONS = RENAMED.keys() | {"observe"}
"""Options of `Ring` that `create` sets itself."""
MAX_ITERATIONS = 1000
"""Steps kept for `get_latest_iteration_stats`."""
POLL_SECONDS = 0.05
"""Interval at which `aget_kv_cache_events` polls for events, which arrive on another event loop."""


class GenerationExecutor(RequestQueue):
    """Runs generation requests on a ring on this machine (`create`) or on a running server (`connect`). Thread-safe.

    ::

        with GenerationExecutor.create("path/to/checkpoint") as executor:
            print(executor.generate("Hello", SamplingParams(max_tokens=16)).outputs[0].text)

    Shut it down with `shutdown` or by using it as a context manager. Garbage collection and the end of the program shut
    it down too.
    """

    def __init__(self, session: Session, ring: LocalRing | None = None, callbacks: Callbacks | None = None) -> None:
        super().__init__(session)
        self._ring = ring
        if ring is not None:
            ring.at_exit = session.close
        # The finalizer must not refer to `self`, or `self` would never be garbage-collected.
        self._end = weakref.finalize(self, _close, Creator(), session, ring, callbacks)

    @classmethod
    def create(
        cls,
        model: str | None = None,
        *,
        revision: str | None = None,
        num_postprocess_workers: int = 2,
        engines: int | None = None,
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

        - `model`: a checkpoint folder or a Hugging Face id (None: the bundled tiny model); `revision`: its branch, tag
          or commit. `draft_model`: a folder or Hugging Face id for speculative decoding, see docs/speculation.md.
        - `engines`, `num_postprocess_workers`: number of engines, and of detokenizers.
        - `max_batch_size`, `max_num_tokens`, `enable_chunked_context`, `kv_cache_config`, `scheduler_config`: limits of
          each engine; None: the engine's default. `engine_args`: any other settings of `engine_worker`, by name.
        - `enable_lora`, `peft_cache_config`: either one lets requests use LoRA adapters.
        - `iter_stats_max_iterations`: steps kept for `get_latest_iteration_stats`; 0: no statistics.
        - `max_in_flight`: requests sent at a time; the rest wait in order.
        - `logits_processors`: functions by the name that requests use for them; `logits_processor_batched`: one more,
          named "batched". Functions that the engine cannot import run in this program, see docs/processors.md.
        - `ring_options`: other options of `sluice.launch.Ring`, except `observe`.

        Raises CheckpointError, ValueError or TypeError for an invalid argument, RingError if the ring does not start.
        """
        known = (RING_OPTIONS | signature(cls.create).parameters.keys()) - OWN_OPTIONS
        check_ring_options(ring_options, known, RENAMED)
        callbacks = Callbacks()
        with ExitStack() as undo:
            undo.callback(callbacks.close)
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
            if callbacks.serves and ring_options.get("on", LOCAL) != LOCAL:
                raise ValueError(
                    "logits_processors: functions of this program need engines on this machine; give functions that "
                    'engines can import, as "module:function"'
                )
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
        """Connect to a running server, such as `sluice serve`, at the addresses of one or more of its routers.

        `client_options` are those of `sluice.client.Client`. Raises SluiceError if no router answers.
        """
        return cls(Session(addresses, max_in_flight, iter_stats_max_iterations, client_options))

    def generate_async(
        self,
        inputs: Prompt | None = None,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        *,
        prompt_token_ids: Sequence[int] | None = None,
        **options: Unpack[RequestOptions],
    ) -> GenerationResult:
        """Start generating for one prompt: text, token ids, or the messages of a chat.

        `prompt_token_ids` is another name of `inputs`. With `streaming`, iterate over the result to read tokens as they
        arrive. `options` are fields of `GenerationRequest`. Raises TypeError for an invalid option, RuntimeError after
        `shutdown`.
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
        """Generate for one prompt or for a list of prompts, and wait for the results, which are in the same order.

        At most `max_in_flight` requests run at a time; they are retried while the server is overloaded. A list shows
        its progress on stderr unless `use_tqdm` is false. `sampling_params`, `lora_request`, `prompt_adapter_request`,
        `kv_cache_retention_config`, `cache_salt` and `client_id` are either one value for all prompts or a list with
        one per prompt; `draft_token_ids`, `draft_logits` and `images` of several prompts are lists with one per prompt.
        `prompt_token_ids` is another name of `inputs`; `options` are fields of `GenerationRequest`. Raises RequestError
        for the first request that fails, ValueError for lists of unequal length, TypeError for an invalid option; any
        exception cancels the remaining requests.
        """
        prompt_or_prompts: Any = either("inputs", inputs, "prompt_token_ids", prompt_token_ids)
        single = not is_batch(prompt_or_prompts)
        if single:
            requests = [GenerationRequest(prompt_or_prompts, sampling_params or SamplingParams(), **options)]  # type: ignore[arg-type]
        else:
            requests = batch_requests(prompt_or_prompts, sampling_params or SamplingParams(), options)
        batch = BatchRun(partial(self._submit, patient=True), max_in_flight)
        try:
            batch.run(requests, show=use_tqdm and not single)
        except BaseException:
            self._cancel(batch.results)
            raise
        return batch.results[0] if single else batch.results

    def get_latest_iteration_stats(self, timeout: Timeout = 0.0) -> list[ReportedStep]:
        """Return the steps of all engines since the last call, oldest first.

        Waits up to `timeout` (seconds or a timedelta; None: without limit) for the first step. Engines report twice a
        second, and nothing while idle. Once every step has been read: raises SluiceError if the server does not provide
        statistics (any more), RuntimeError after `shutdown`.
        """
        return [read_step(stats) for stats in self._session.steps.take_steps(timeout)]

    def get_latest_stats(self, timeout: Timeout = 0.0) -> ReportedStep | None:
        """Return the newest step since the last call, and discard those before it; None if there was none.

        Waits and raises like `get_latest_iteration_stats`.
        """
        steps = self.get_latest_iteration_stats(timeout)
        return steps[-1] if steps else None

    def get_latest_request_stats(self, timeout: Timeout = 0.0) -> list[ReportedRequest]:
        """Return the latest statistics of each request that changed since the last call.

        Waits and raises like `get_latest_iteration_stats`.
        """
        requests = self._session.steps.take_requests(timeout)
        return [read_request(stats, self._session.request_id(stats.request_id)) for stats in requests]

    def get_kv_cache_events(self, timeout: Timeout = 0.0) -> list[KVCacheEvent]:
        """Return the KV cache events of all engines since the last call, oldest first.

        Waits up to `timeout` (seconds or a timedelta; None: without limit) for the first event. The first call starts
        at the oldest events in the engines' buffers, whose size is `KvCacheConfig.event_buffer_max_size`. Raises
        SluiceError if the engines keep no events; RuntimeError after `shutdown`, once every event has been read.
        """
        self.follow_kv_cache_events()
        return self._session.cache_events.take(timeout)

    async def aget_kv_cache_events(self, timeout: Timeout = 0.0) -> list[KVCacheEvent]:
        """Like `get_kv_cache_events`, without blocking the event loop."""
        deadline = Deadline(timeout)
        while not (events := self.get_kv_cache_events(0)) and deadline.left != 0:
            await asyncio.sleep(min(POLL_SECONDS, deadline.slice))
        return events

    def follow_kv_cache_events(self) -> None:
        """Start receiving KV cache events, as the first `get_kv_cache_events` does."""
        self._session.follow_cache()

    @property
    def latest_iteration(self) -> int:
        """Number of the newest step that an engine has reported; 0 before the first report."""
        return self._session.steps.latest_iteration

    @property
    def tokens_per_block(self) -> int:
        """Tokens per KV cache block; 1 until an engine has reported a step."""
        return self._session.steps.tokens_per_block

    def collective_rpc(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run a method, by name, on every rank of every engine, and return its values by engine id, then rank.

        `ranks` restricts the call to these ranks of each engine; `timeout` is in seconds (default 30). See
        `sluice.client.Client.call_engines`. Raises CollectiveRpcError if a rank failed.
        """
        call = partial(AsyncClient.call_engines, method=method, args=args, kwargs=kwargs, ranks=ranks, timeout=timeout)
        return values_of(self._session.run(call))

    def shutdown(self, *, abort: bool = False, timeout: Timeout = None) -> None:
        """Accept no more requests, wait for the submitted ones, then close the connection and stop the executor's ring.

        With `abort`, at the timeout (seconds or a timedelta), and on Ctrl-C, the running requests are aborted: their
        results raise RequestError. Idempotent. Raises ValueError for a timeout together with `abort`.
        """
        if abort and timeout is not None:
            raise ValueError("shutdown(abort=True) does not wait for requests, so it accepts no timeout")
        try:
            if not abort and not self._session.finish(timeout):
                log.warning("shutdown: aborting the requests that did not end within %g s", in_seconds(timeout))
        finally:
            self._close()

    def _close(self) -> None:
        try:
            self._end()
        finally:
            self._ready.close()
            self._session.steps.close()
            self._session.cache_events.close()

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the executor's own ring, by service; empty if the executor is connected to a server."""
        return self._ring.pids if self._ring else {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.shutdown(abort=kind is not None)


def _close(creator: Creator, session: Session, ring: LocalRing | None, callbacks: Callbacks | None) -> None:
    if creator.is_elsewhere:
        # The session, the ring and the sockets belong to the process that created them.
        return
    with ExitStack() as stack:
        if callbacks is not None:
            stack.callback(callbacks.close)
        if ring is not None:
            stack.callback(ring.close)
        session.close()
