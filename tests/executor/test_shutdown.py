"""How an executor ends: it waits for its requests, or aborts them on demand or after an error."""

import signal
import threading
from collections.abc import Callable

import pytest

from sluice.client import Cancelled
from sluice.executor import GenerationExecutor, GenerationResult, RequestError
from tests.fakes.processes import wait_until
from tests.fakes.server_script import Script

LIMIT = 60


def connect(address: str, **options) -> GenerationExecutor:
    return GenerationExecutor.connect(address, iter_stats_max_iterations=0, **options)


def once_finishing(executor: GenerationExecutor, act: Callable[[], object]) -> threading.Thread:
    """Calls `act` in a thread as soon as the executor accepts no more requests."""

    def work() -> None:
        if wait_until(lambda: not executor.can_enqueue_requests()):
            act()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def release(script: Script) -> None:
    """Let all requests end, including those that hang."""
    script.hangs = False


def assert_aborted(result: GenerationResult) -> None:
    with pytest.raises(RequestError, match="shut down") as caught:
        result.result(LIMIT)
    assert isinstance(caught.value.error, Cancelled)


def start_two(executor: GenerationExecutor, script: Script) -> list[GenerationResult]:
    """Start two requests. If `max_in_flight` is 1, one hangs at the server and the other waits in the executor."""
    script.hangs = True
    results = [executor.generate_async("x", streaming=streaming) for streaming in (True, False)]
    assert wait_until(lambda: bool(script.hanging))
    return results


def test_leaving_the_block_finishes_requests(address, script) -> None:
    with connect(address, max_in_flight=1) as executor:
        results = start_two(executor, script)
        once_finishing(executor, lambda: release(script))
    assert [result.result(LIMIT).outputs[0].text for result in results] == ["Hello, world"] * 2


def test_shutdown_finishes_requests(address, script) -> None:
    executor = connect(address, max_in_flight=1)
    results = start_two(executor, script)
    once_finishing(executor, lambda: release(script))
    executor.shutdown()
    executor.shutdown()
    assert [result.result(LIMIT).outputs[0].text for result in results] == ["Hello, world"] * 2
    with pytest.raises(RuntimeError, match="shut down"):
        executor.await_responses(timeout=LIMIT)


def test_no_request_is_accepted_during_shutdown(address, script) -> None:
    errors: list[RuntimeError] = []
    executor = connect(address)
    assert executor.can_enqueue_requests()
    results = start_two(executor, script)

    def submit_one_more() -> None:
        try:
            executor.generate_async("x")
        except RuntimeError as error:
            errors.append(error)
        release(script)

    once_finishing(executor, submit_one_more)
    executor.shutdown()
    assert "shut down" in str(errors[0])
    assert all(result.result(LIMIT).outputs[0].text == "Hello, world" for result in results)


def test_responses_are_read_while_shutdown_waits(address, script) -> None:
    executor = connect(address)
    results = start_two(executor, script)
    stopping = threading.Thread(target=executor.shutdown)
    stopping.start()
    assert wait_until(lambda: not executor.can_enqueue_requests())
    release(script)
    final = set()
    while len(final) < len(results):
        final |= {answer.request_id for answer in executor.await_responses(timeout=LIMIT) if answer.result.is_final}
    stopping.join(LIMIT)
    assert final == {result.request_id for result in results}


def test_an_exception_in_the_block_aborts_requests(address, script) -> None:
    results: list[GenerationResult] = []

    def work() -> None:
        with connect(address) as executor:
            results.extend(start_two(executor, script))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    for result in results:
        assert_aborted(result)


def test_shutdown_with_abort(address, script) -> None:
    executor = connect(address)
    results = start_two(executor, script)
    executor.shutdown(abort=True)
    for result in results:
        assert_aborted(result)


def test_another_thread_may_abort_while_shutdown_waits(address, script) -> None:
    executor = connect(address)
    results = start_two(executor, script)
    once_finishing(executor, lambda: executor.shutdown(abort=True))
    executor.shutdown()
    for result in results:
        assert_aborted(result)


def test_ctrl_c_while_shutdown_waits(address, script) -> None:
    executor = connect(address)
    results = start_two(executor, script)
    main = threading.main_thread().ident
    once_finishing(executor, lambda: signal.pthread_kill(main, signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        executor.shutdown()
    for result in results:
        assert_aborted(result)


def test_requests_are_aborted_after_the_timeout(address, script, caplog) -> None:
    executor = connect(address)
    results = start_two(executor, script)
    executor.shutdown(timeout=0.05)
    for result in results:
        assert_aborted(result)
    assert "shutdown: aborting the requests that did not end within 0.05 s" in caplog.messages


def test_an_abort_has_no_timeout(executor) -> None:
    with pytest.raises(ValueError, match="accepts no timeout"):
        executor.shutdown(abort=True, timeout=1)
    assert executor.generate("x").outputs[0].text == "Hello, world"
