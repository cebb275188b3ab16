"""The processes behind guides: they start late, end with the engine, and fail with a reason."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from engine_worker.guided import guides as module
from engine_worker.guided.faults import too_complex
from engine_worker.guided.messages import key_of
from engine_worker.guided.processes import Model, TemplateLink
from engine_worker.guided.template import Template
from sluice.ring.errors import ErrorCode
from sluice.ring.params import Guide, GuideKind
from tests.engine_worker.guided.tools import END, TOKENIZER_FILE, allowed, followed, make, mask, prepared, regex
from tests.fakes.processes import wait_until

pytestmark = pytest.mark.process


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except FileNotFoundError:
        return False


def test_nothing_starts_before_it_is_needed():
    guides = make()
    assert guides._processes._template is None
    guides.close()


def test_the_template_has_one_thread_and_ends_with_its_children(own):
    followed(own, regex("a"))
    template, worker = own._processes.template().pid, own._processes.current().pid
    assert len(os.listdir(f"/proc/{template}/task")) == 1
    own.close()
    assert not is_running(template)
    assert wait_until(lambda: not is_running(worker))


def test_they_end_with_the_engine_however_it_ends():
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


def test_all_requests_with_a_guide_share_its_compilation(own):
    tried = own._on_tried
    count = []
    own._on_tried = lambda *its: (count.append(1), tried(*its))
    first, second = own.prepare(regex("ab")), own.prepare(regex("ab"))
    assert first is second
    assert wait_until(first.poll)
    assert own.prepare(regex("ab")) is None
    assert count == [1]


def test_more_than_the_worker_keeps_are_compiled_again(own):
    sequences = [followed(own, regex(f"x{i}"))[0] for i in range(70)]
    for i, sequence in enumerate(sequences):
        assert not mask(own, sequence, []).fault
        assert allowed(mask(own, sequence, [])), i


def test_what_is_known_to_compile_is_not_tried_again(own):
    count = []
    tried = own._on_tried
    own._on_tried = lambda *its: (count.append(1), tried(*its))
    (sequence,) = followed(own, regex("ab"))
    os.kill(own._processes.current().pid, signal.SIGKILL)
    assert not mask(own, sequence, []).fault
    # The new worker is asked to compile it.
    assert own.prepare(regex("ab")) is not None
    followed(own, regex("ab"))
    assert own.prepare(regex("ab")) is None
    assert count == [1]


def test_a_compilation_killed_by_something_else_is_tried_again(own):
    slow = Guide(GuideKind.JSON_SCHEMA, json.dumps({"enum": [str(i) * 10 for i in range(20_000)]}))
    prepared(own, regex("a"))
    template = own._processes.template().pid
    worker = own._processes.current().pid
    preparation = own.prepare(slow)

    def trials() -> list[int]:
        preparation.poll()
        children = Path(f"/proc/{template}/task/{template}/children").read_text().split()
        return [int(pid) for pid in children if int(pid) != worker]

    assert wait_until(lambda: bool(trials()))
    os.kill(trials()[0], signal.SIGKILL)
    assert wait_until(preparation.poll)
    assert preparation.fault is None


def test_what_a_sequence_held_is_released(own):
    (sequence,) = followed(own, regex("a+"))
    mask(own, sequence, [])
    number = sequence.number
    del sequence
    assert list(own._released) == [number]
    (other,) = followed(own, regex("b+"))
    mask(own, other, [])
    assert not own._released


def test_a_tokenizer_that_cannot_be_read(tmp_path):
    file = tmp_path / "tokenizer.json"
    file.write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    guides = make(Model(file, 4096, (END,)))
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
    guides = make(Model(TOKENIZER_FILE, 4200, (END,)))
    (sequence,) = followed(guides, regex("(?s).*"))
    found = allowed(mask(guides, sequence, []))
    assert END in found
    assert max(found) <= 4096 - 1
    guides.close()


def test_the_template_imports_no_torch():
    code = f"import {Template.__module__}, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_guide_that_nobody_waits_for_any_more_is_not_compiled(own):
    abandoned = [own.prepare(regex(f"x{i}y")) for i in range(500)]
    shared = own.prepare(regex("x7y"))
    for preparation in abandoned:
        preparation.withdraw()
    assert prepared(own, regex("last")) is None
    assert wait_until(shared.poll)
    assert shared.fault is None
    assert not own._pending
    assert not own._untried
    # Those that were being compiled, the one that two had asked for, and the last.
    assert len(own._compiled) <= module.MAX_TRIALS + 2


def test_what_is_too_complex_for_new_streams_is_not_refused_to_recovered_ones(own):
    guide = regex("[ab]+")
    followed(own, guide)
    own._refused_guides.refuse(key_of(guide), too_complex(guide, signal.SIGPROF, own._limits))
    assert own.prepare(guide).fault.error_code is ErrorCode.GUIDE_TOO_COMPLEX
    assert own.prepare(guide, recovered=True) is None


def test_preparing_never_waits(own, monkeypatch):
    """Neither for a process that starts, here one that stands still, nor for a thread that holds the lock."""
    start = own._processes._start

    def start_stopped() -> TemplateLink:
        link = start()
        os.kill(link.pid, signal.SIGSTOP)
        return link

    monkeypatch.setattr(own._processes, "_start", start_stopped)
    preparation = own.prepare(Guide(GuideKind.CHOICE, json.dumps([str(i) * 10 for i in range(8000)])))
    with own._processes._lock:
        assert not preparation.poll()
    for _ in range(2):
        assert not preparation.poll()
    os.kill(own._processes._template.pid, signal.SIGCONT)
    assert wait_until(preparation.poll)
    assert preparation.fault is None
