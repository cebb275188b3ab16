"""The processes of guided decoding: they start when needed, end with the engine, and fail with a reason."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from engine_worker.guided import guides as module
from engine_worker.guided.faults import too_complex
from engine_worker.guided.guides import Preparation
from engine_worker.guided.messages import key_of
from engine_worker.guided.processes import HUNG_SECONDS, GuideModel, TemplateLink
from engine_worker.guided.template import Template
from sluice.wire.errors import ErrorCode
from sluice.wire.params import Guide, GuideKind
from tests.engine_worker.guided.tools import END, TOKENIZER_FILE, allowed, followed, make, mask, prepared, regex
from tests.fakes.processes import wait_until

pytestmark = pytest.mark.process


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except FileNotFoundError:
        return False


def test_processes_start_when_they_are_needed():
    guides = make()
    assert guides._processes._template is None
    guides.close()


def test_the_template_has_one_thread_and_ends_with_its_children(fresh_guides):
    followed(fresh_guides, regex("a"))
    template, worker = fresh_guides._processes.template().pid, fresh_guides._processes.current().pid
    assert len(os.listdir(f"/proc/{template}/task")) == 1
    fresh_guides.close()
    assert not is_running(template)
    assert wait_until(lambda: not is_running(worker))


def test_processes_end_with_a_killed_engine():
    code = """
        import sys, time
        from tests.engine_worker.guided.tools import followed, make, regex
        guides = make()
        followed(guides, regex("a"))
        print(guides._processes.template().pid, guides._processes.current().pid, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True) as engine:
        pids = [int(pid) for pid in engine.stdout.readline().split()]
        assert all(map(is_running, pids))
        engine.kill()
    assert wait_until(lambda: not any(map(is_running, pids)))


def test_all_requests_with_a_guide_share_its_compilation(fresh_guides):
    tried = fresh_guides._on_tried
    count = []
    fresh_guides._on_tried = lambda *arguments: (count.append(1), tried(*arguments))
    first, second = fresh_guides.prepare(regex("ab")), fresh_guides.prepare(regex("ab"))
    assert first is second
    assert wait_until(first.poll)
    assert fresh_guides.prepare(regex("ab")) is None
    assert count == [1]


def test_more_than_the_worker_keeps_are_compiled_again(fresh_guides):
    sequences = [followed(fresh_guides, regex(f"x{i}"))[0] for i in range(70)]
    for i, sequence in enumerate(sequences):
        assert not mask(fresh_guides, sequence, []).fault
        assert allowed(mask(fresh_guides, sequence, [])), i


def test_a_valid_guide_has_one_trial(fresh_guides):
    count = []
    tried = fresh_guides._on_tried
    fresh_guides._on_tried = lambda *arguments: (count.append(1), tried(*arguments))
    (sequence,) = followed(fresh_guides, regex("ab"))
    os.kill(fresh_guides._processes.current().pid, signal.SIGKILL)
    assert not mask(fresh_guides, sequence, []).fault
    # The new worker has to compile it.
    assert fresh_guides.prepare(regex("ab")) is not None
    followed(fresh_guides, regex("ab"))
    assert fresh_guides.prepare(regex("ab")) is None
    assert count == [1]


SLOW = Guide(GuideKind.JSON_SCHEMA, json.dumps({"enum": [str(i) * 10 for i in range(20_000)]}))


def trials(preparation: Preparation, template: int, worker: int) -> list[int]:
    """Process ids of the running trials."""
    preparation.poll()
    children = Path(f"/proc/{template}/task/{template}/children").read_text().split()
    return [int(pid) for pid in children if int(pid) != worker]


def test_a_trial_killed_from_outside_is_repeated(fresh_guides):
    prepared(fresh_guides, regex("a"))
    template = fresh_guides._processes.template().pid
    worker = fresh_guides._processes.current().pid
    preparation = fresh_guides.prepare(SLOW)
    assert wait_until(lambda: bool(trials(preparation, template, worker)))
    os.kill(trials(preparation, template, worker)[0], signal.SIGKILL)
    assert wait_until(preparation.poll)
    assert preparation.fault is None


@pytest.mark.parametrize("stopped", ["worker", "template"])
def test_a_stopped_process_delays_no_step(fresh_guides, stopped):
    """All requests wait for the masks, so it must not take the timeout of HUNG_SECONDS."""
    streams = followed(fresh_guides, regex("[ab]+"), size=20)
    before = [allowed(mask(fresh_guides, each, [])) for each in streams]
    template, worker = fresh_guides._processes.template().pid, fresh_guides._processes.current().pid
    began = time.monotonic()
    if stopped == "template":
        os.kill(template, signal.SIGSTOP)
        os.kill(worker, signal.SIGKILL)
    else:
        os.kill(worker, signal.SIGSTOP)
    assert [allowed(mask(fresh_guides, each, [])) for each in streams] == before
    assert time.monotonic() - began < HUNG_SECONDS / 4


@pytest.mark.parametrize("stopped", ["worker", "template", "trial"])
def test_a_guide_is_compiled_although_a_process_was_stopped(fresh_guides, stopped):
    prepared(fresh_guides, regex("a"))
    template, worker = fresh_guides._processes.template().pid, fresh_guides._processes.current().pid
    preparation = fresh_guides.prepare(SLOW)
    if stopped == "trial":
        assert wait_until(lambda: bool(trials(preparation, template, worker)))
    pids = {"worker": worker, "template": template}
    os.kill(pids.get(stopped) or trials(preparation, template, worker)[0], signal.SIGSTOP)
    assert wait_until(preparation.poll)
    assert preparation.fault is None


def test_a_tenant_with_slow_guides_does_not_delay_another_one(fresh_guides):
    slow = [Guide(GuideKind.CHOICE, json.dumps([str(j) * 10 for j in range(i, 5000)])) for i in range(12)]
    waiting = [fresh_guides.prepare(guide, tenant="hostile") for guide in slow]
    quick = fresh_guides.prepare(regex("ab"), tenant="honest")
    assert wait_until(quick.poll)
    assert sum(preparation.done for preparation in waiting) < len(waiting) / 2
    for preparation in waiting:
        preparation.withdraw()


def test_the_matcher_of_a_deleted_sequence_is_released(fresh_guides):
    (sequence,) = followed(fresh_guides, regex("a+"))
    mask(fresh_guides, sequence, [])
    number = sequence.number
    del sequence
    assert list(fresh_guides._released) == [number]
    (other,) = followed(fresh_guides, regex("b+"))
    mask(fresh_guides, other, [])
    assert not fresh_guides._released


def test_a_tokenizer_that_cannot_be_read(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    guides = make(GuideModel(file, 4096, (END,)))
    for _ in range(2):
        fault = prepared(guides, regex("a"))
        assert fault.error_code is ErrorCode.INTERNAL
        assert "the tokenizer cannot be used" in fault.message
    guides.close()


def test_without_the_package(monkeypatch):
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    guides = make()
    preparation = guides.prepare(regex("a"))
    assert preparation.done
    assert preparation.fault.error_code is ErrorCode.NOT_BUILT_YET
    assert "llguidance is not installed" in preparation.fault.message


def test_ids_beyond_the_tokenizer_are_never_allowed():
    guides = make(GuideModel(TOKENIZER_FILE, 4200, (END,)))
    (sequence,) = followed(guides, regex("(?s).*"))
    allowed_ids = allowed(mask(guides, sequence, []))
    assert END in allowed_ids
    assert max(allowed_ids) <= 4096 - 1
    guides.close()


def test_the_template_imports_no_torch():
    code = f"import {Template.__module__}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_guide_without_waiting_requests_is_not_compiled(fresh_guides):
    abandoned = [fresh_guides.prepare(regex(f"x{i}y")) for i in range(500)]
    shared = fresh_guides.prepare(regex("x7y"))
    for preparation in abandoned:
        preparation.withdraw()
    assert prepared(fresh_guides, regex("last")) is None
    assert wait_until(shared.poll)
    assert shared.fault is None
    assert not fresh_guides._pending
    assert not fresh_guides._trials.waiting
    # The guides that were being compiled, the one with two requests, and the last.
    assert len(fresh_guides._compiled) <= module.TRIAL_SLOTS + 1


def test_recovered_streams_are_not_refused_as_too_complex(fresh_guides):
    guide = regex("[ab]+")
    followed(fresh_guides, guide)
    fresh_guides._refused_guides.refuse(key_of(guide), too_complex(guide, signal.SIGPROF, fresh_guides._limits))
    assert fresh_guides.prepare(guide).fault.error_code is ErrorCode.GUIDE_TOO_COMPLEX
    assert fresh_guides.prepare(guide, recovered=True) is None


def test_preparing_never_waits(fresh_guides, monkeypatch):
    """It waits neither for a process that is starting, here a stopped one, nor for a thread that holds the lock."""
    start = fresh_guides._processes._start

    def start_stopped() -> TemplateLink:
        link = start()
        os.kill(link.pid, signal.SIGSTOP)
        return link

    monkeypatch.setattr(fresh_guides._processes, "_start", start_stopped)
    preparation = fresh_guides.prepare(Guide(GuideKind.CHOICE, json.dumps([str(i) * 10 for i in range(8000)])))
    with fresh_guides._processes._lock:
        assert not preparation.poll()
    for _ in range(2):
        assert not preparation.poll()
    os.kill(fresh_guides._processes._template.pid, signal.SIGCONT)
    assert wait_until(preparation.poll)
    assert preparation.fault is None
