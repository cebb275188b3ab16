"""`Executor`: the API of tensorrt_llm.bindings.executor.Executor over `sluice.executor`."""

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, overload
from weakref import WeakKeyDictionary

from sluice import executor
from sluice.checkpoint.folder import open_checkpoint
from sluice.client.values import as_id, as_ids, is_id
from sluice.executor import GenerationExecutor, GenerationResult
from sluice.executor.callbacks import RequestProcessors
from sluice.executor.forks import Creator
from sluice.executor.waiting import Timeout
from sluice.trtllm.config import ExecutorConfig
from sluice.trtllm.debug_tensors import DebugFolder
from sluice.trtllm.enums import ModelType
from sluice.trtllm.kv_cache import KVCacheEventManager
from sluice.trtllm.lora import LoraTasks
from sluice.trtllm.open_request import OpenRequest, RowWidths
from sluice.trtllm.options import OptionError, UnsupportedOptionError
from sluice.trtllm.processors import DYNAMIC, request_processor
from sluice.trtllm.request import Request
from sluice.trtllm.result import Response
from sluice.trtllm.statistics import (
    DebugTensorsPerIteration,
    IterationStats,
    RequestStatsPerIteration,
    read_request,
    read_step,
    step_number,
)
from sluice.trtllm.to_request import Translator, Words
from sluice.trtllm.to_ring import has_adapters, is_static, ring_arguments


class Executor:
    """Starts a ring on this machine for a checkpoint, and runs requests on it. Thread-safe.

    Shut it down with `shutdown` or by using it as a context manager.
    """

    def __init__(
        self, model_path: str | PathLike[str], model_type: ModelType, executor_config: ExecutorConfig, *more: Any
    ) -> None:
        """Start the ring and wait until it is ready. `model_path` is the folder of a checkpoint.

        Raises UnsupportedOptionError for an unsupported option, OptionError if the folder does not exist, and the
        exceptions of `GenerationExecutor.create`.
        """
        if more or model_type is not ModelType.DECODER_ONLY or isinstance(model_path, bytes):
            raise UnsupportedOptionError(
                "Executor", "only Executor(model_path, ModelType.DECODER_ONLY, executor_config) is implemented"
            )
        path = Path(model_path)
        if not path.is_dir():
            raise OptionError(f"File does not exist: {path} (must be the folder of a checkpoint)")
        arguments = ring_arguments(executor_config)
        checkpoint = open_checkpoint(str(path))
        self._is_static = is_static(executor_config)
        self._max_request_stats = executor_config.request_stats_max_iterations
        self._keeps_events = executor_config.kv_cache_config.event_buffer_max_size > 0
        self._keeps_steps = executor_config.iter_stats_max_iterations > 0
        prefetch = executor_config.peft_cache_config.lora_prefetch_dir
        self._tasks = LoraTasks(checkpoint.config, prefetch) if has_adapters(executor_config) else None
        self._translator = Translator(
            Words(checkpoint.tokenizer_file), checkpoint.vocab_size, executor_config.max_beam_width, self._tasks
        )
        self._widths = RowWidths.of(checkpoint.config)
        self._open: dict[int, GenerationResult] = {}
        # Keyed by result, not by id: another thread may still process a response of a request whose end has been read.
        self._requests: WeakKeyDictionary[GenerationResult, OpenRequest] = WeakKeyDictionary()
        self._lock = threading.Lock()
        self._last_id = 0
        self._shut_down = False
        self._creator = Creator()
        self._processors = RequestProcessors()
        arguments["logits_processors"] = {**arguments.get("logits_processors", {}), DYNAMIC: self._processors}
        self._debug = DebugFolder.of(executor_config.debug_config)
        if self._debug is not None:
            arguments["engine_args"] |= self._debug.engine_args
        self._executor = GenerationExecutor.create(str(path), **arguments)

    def enqueue_request(self, request: Request) -> int:
        """Start a request, and return its id for `await_responses`.

        Raises UnsupportedOptionError for an unsupported option, OptionError for a value out of range, RuntimeError
        after `shutdown`.
        """
        self._check_running()
        return self._submit(*self._prepare(request))

    def enqueue_requests(self, requests: Sequence[Request]) -> list[int]:
        """Start requests in order, and return their ids. Raises like `enqueue_request`, before any is started."""
        self._check_running()
        prepared = []
        for i, request in enumerate(requests):
            try:
                prepared.append(self._prepare(request))
            except Exception as error:
                error.add_note(f"in requests[{i}]; none of the requests was enqueued")
                raise
        return [self._submit(*each) for each in prepared]

    def _prepare(self, request: Request) -> tuple[Callable[[], GenerationResult], OpenRequest]:
        """Translate a request. A request that this accepts can be submitted and its responses can be read."""
        if not isinstance(request, Request):
            raise TypeError(f"a request must be a Request, not {type(request).__name__}")
        translated = self._translator.translate(request)
        submit = partial(self._executor.submit, translated)
        if (function := request_processor(request)) is not None:
            submit = partial(self._processors.submit, submit, function)
        num_outputs = max(1, translated.sampling_params.n)
        return submit, OpenRequest(request, num_outputs, time.time(), self._widths)

    def _submit(self, submit: Callable[[], GenerationResult], responses: OpenRequest) -> int:
        # Under the lock, so that another thread cannot process a response of a request that is not registered yet.
        with self._lock:
            result = submit()
            self._open[result.request_id] = result
            self._requests[result] = responses
            self._last_id = max(self._last_id, result.request_id)
        return result.request_id

    @overload
    def await_responses(self, timeout: Timeout = None) -> list[Response]: ...

    @overload
    def await_responses(self, id: int, timeout: Timeout = None) -> list[Response]: ...

    @overload
    def await_responses(self, ids: Sequence[int], timeout: Timeout = None) -> list[list[Response]]: ...

    def await_responses(self, *args: Any, **kwargs: Any) -> list[Response] | list[list[Response]]:
        """Wait for responses of any request, of one request (an id), or of each of several (ids).

        Returns an empty list at the timeout (seconds or a timedelta), or if `shutdown` in another thread ends the wait.
        Raises ValueError for an unknown id, RuntimeError after `shutdown`.
        """
        ids, timeout = _parse(args, kwargs)
        self._check_running()
        deadline = executor.Deadline(timeout)
        if ids is None:
            return self._await_any(deadline)
        if isinstance(ids, int):
            return self._await_one(ids, self._find(ids), deadline)
        # All ids are checked first: an unknown one must not cost the responses of others.
        found = [(request_id, self._find(request_id)) for request_id in ids]
        return [self._await_one(request_id, result, deadline) for request_id, result in found]

    def get_num_responses_ready(self, id: int | None = None) -> int:  # noqa: A002
        """Number of responses, of one request or of all, that `await_responses` would return without waiting."""
        self._check_running()
        with self._lock:
            results = self._open.values() if id is None else filter(None, [self._open.get(id)])
            return sum(self._requests[result].num_ready(result) for result in results)

    def cancel_request(self, id: int) -> None:  # noqa: A002
        """Cancel a request: its outputs end with CANCELLED. Has no effect on a request that has already ended."""
        self._check_running()
        self._executor.abort_request(id)

    def can_enqueue_requests(self) -> bool:
        """Whether requests can be enqueued: False after `shutdown`, and in a fork."""
        return not self._creator.is_elsewhere and self._executor.can_enqueue_requests()

    def get_latest_iteration_stats(self) -> list[IterationStats]:
        """Return the steps since the last call, oldest first. Engines report them twice a second."""
        self._check_running()
        steps = self._executor.get_latest_iteration_stats() if self._keeps_steps else []
        return [read_step(step, self._is_static) for step in steps]

    def get_latest_request_stats(self) -> list[RequestStatsPerIteration]:
        """Return the latest statistics of each request that changed since the last call.

        Empty unless `ExecutorConfig.request_stats_max_iterations` is above 0.
        """
        self._check_running()
        if not self._max_request_stats:
            return []
        latest = self._executor.get_latest_request_stats()[-self._max_request_stats :]
        requests = [read_request(stats, stats.id) for stats in latest if stats.id is not None]
        return [RequestStatsPerIteration(step_number(self._executor.latest_iteration), requests)] if requests else []

    def get_latest_debug_tensors(self) -> list[DebugTensorsPerIteration]:
        """Return the steps since the last call, oldest first.

        Empty with `DebugConfig.debug_tensors_max_iterations` = 0, which leaves them in files.
        """
        self._check_running()
        return [] if self._debug is None else self._debug.take()

    def get_kv_cache_event_manager(self) -> KVCacheEventManager | None:
        """The events of the engines' KV caches; None if `KvCacheConfig.event_buffer_max_size` is 0."""
        self._check_running()
        return KVCacheEventManager(self._executor) if self._keeps_events else None

    def shutdown(self) -> None:
        """Wait for the running requests, then stop the ring. Idempotent."""
        self._end(abort=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._end(abort=kind is not None)

    def _end(self, *, abort: bool) -> None:
        try:
            self._executor.shutdown(abort=abort)
        finally:
            self._shut_down = True
            if self._debug is not None:
                self._debug.close()
            if self._tasks is not None:
                self._tasks.close()

    def _await_any(self, deadline: executor.Deadline) -> list[Response]:
        responses: list[Response] = []
        # In a loop, because everything that was read may be held back for now.
        while not responses:
            try:
                batch = self._executor.read_any(deadline.left)
            except RuntimeError:
                # Another thread has shut the executor down.
                return []
            if not batch:
                break
            responses = [response for result, received in batch for response in self._read(result, received)]
        return responses

    def _find(self, request_id: int) -> GenerationResult | None:
        """The result of a request; None if its end has been read. Raises ValueError for an unknown id."""
        with self._lock:
            if not 0 < request_id <= self._last_id:
                raise ValueError(f"no request {request_id}: it was never enqueued")
            return self._open.get(request_id)

    def _await_one(
        self, request_id: int, result: GenerationResult | None, deadline: executor.Deadline
    ) -> list[Response]:
        if result is None or result.done:
            return [Response(request_id, f"ReqId {request_id} has already been processed and was terminated.")]
        while received := result.read_within(deadline):
            if responses := self._read(result, received):
                return responses
        return []

    def _read(self, result: GenerationResult, received: Sequence[executor.Response]) -> list[Response]:
        with self._lock:
            request = self._requests[result]
            if result.done:
                self._open.pop(result.request_id, None)
                self._processors.forget(result.request_id)
        if result.adapter_refused and self._tasks is not None and result.request.lora_request is not None:
            self._tasks.mark_refused(result.request.lora_request)
        size = self._executor.tokens_per_block
        return [translated for response in received for translated in request.read(result, response, size)]

    def _check_running(self) -> None:
        """Raises RuntimeError after `shutdown`, and in a fork, where no response ever arrives."""
        self._creator.check()
        if self._shut_down:
            raise RuntimeError("the executor was shut down")


def _parse(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int | Sequence[int] | None, Timeout]:
    """The id or ids, and the timeout, in the arguments of any overload of `await_responses`. Raises TypeError."""
    unknown = set(kwargs) - {"id", "ids", "timeout"}
    if unknown or len(args) + len(kwargs) > 2:
        raise TypeError(f"await_responses accepts id or ids, and timeout; got {args} and {kwargs}")
    rest = list(args)
    ids = kwargs.get("id", kwargs.get("ids"))
    if ids is None and rest and not isinstance(rest[0], timedelta | float | None):
        ids = rest.pop(0)
    timeout = rest.pop(0) if rest else kwargs.get("timeout")
    if rest or not isinstance(timeout, timedelta | float | int | None):
        raise TypeError(f"await_responses accepts id or ids, and timeout; got {args} and {kwargs}")
    if ids is None:
        return None, timeout
    return as_id("id", ids) if is_id(ids) else as_ids("ids", ids), timeout
