"""Forks of a process with an `Executor`: its calls raise with the remedy, as those of `sluice.executor` do.

The test only changes the process id, since gRPC may crash in a real fork.
"""

import os

import pytest

import sluice.trtllm as trtllm
from tests.trtllm.running import PROMPT, run, start


def test_calls_in_a_fork_raise_with_the_remedy(scripted, script, monkeypatch) -> None:
    script.hangs = True
    request = trtllm.Request(PROMPT, 5)
    request_id = scripted.enqueue_request(request)
    events = scripted.get_kv_cache_event_manager()
    calls = [
        lambda: scripted.enqueue_request(request),
        lambda: scripted.enqueue_requests([request]),
        scripted.await_responses,
        lambda: scripted.await_responses(request_id),
        lambda: scripted.await_responses([request_id]),
        scripted.get_num_responses_ready,
        lambda: scripted.cancel_request(request_id),
        scripted.get_latest_iteration_stats,
        scripted.get_latest_request_stats,
        scripted.get_latest_debug_tensors,
        scripted.get_kv_cache_event_manager,
        lambda: events.get_latest_events(0),
        start,
    ]
    pid = os.getpid()
    with monkeypatch.context() as fork:
        fork.setattr(os, "getpid", lambda: pid + 1)
        for call in calls:
            with pytest.raises(RuntimeError, match=r"in a fork .* multiprocessing\.get_context\(\"spawn\"\)"):
                call()
        assert not scripted.can_enqueue_requests()
    assert scripted.can_enqueue_requests()
    script.hangs = False
    assert not any(response.has_error() for response in run(scripted))
