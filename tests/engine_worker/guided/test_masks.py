"""Which tokens come next: at the start, step by step, with guesses, at the end, and after the worker has died."""

import json
import os
import random
import signal
import socket
import struct
import sys
from collections import deque
from pathlib import Path
from threading import Thread

import pytest

from engine_worker.guided.masks import MaskRequest, take_all
from engine_worker.guided.processes import WorkerLink
from sluice.ring.errors import ErrorCode
from sluice.ring.params import Guide, GuideKind
from tests.engine_worker.guided.tools import (
    END,
    allowed,
    followed,
    ids,
    make,
    mask,
    masked,
    masked_so_far,
    prepared,
    regex,
    texts,
)

pytestmark = pytest.mark.process

SCHEMA = Guide(
    GuideKind.JSON_SCHEMA,
    json.dumps({"type": "object", "properties": {"é": {"type": "string"}, "b": {"type": "integer"}}}),
)


def test_special_tokens_stand_for_no_text(guides):
    (sequence,) = followed(guides, regex(r"(?s)<\|im_start\|>.*"), ends=())
    special = {4093, 4094, 4095}
    found = allowed(mask(guides, sequence, []))
    assert found
    assert not found & special
    (anything,) = followed(guides, regex("(?s).*"))
    assert allowed(mask(guides, anything, [])) & special == {END}


def test_a_token_that_ends_inside_a_character(guides):
    (sequence,) = followed(guides, regex("[日本]{3}"), ends=())
    tokens = ids("日本日")
    assert len(tokens) > 3
    for count in range(len(tokens)):
        assert tokens[count] in allowed(mask(guides, sequence, tokens[:count]))
    assert mask(guides, sequence, tokens).complete


def walk(guides, sequence, seed: int, most: int = 30) -> tuple[list[int], list[set[int]]]:
    rng, output, masks = random.Random(seed), [], []
    while len(output) < most:
        masks.append(allowed(mask(guides, sequence, output)))
        token = rng.choice(sorted(masks[-1]))
        if token == END:
            break
        output.append(token)
    return output, masks


@pytest.mark.parametrize("guide", [SCHEMA, regex(r"[a-z ]{0,9}(\([0-9]+\))*é"), Guide(GuideKind.JSON_OBJECT)])
def test_step_by_step_at_once_and_with_guesses_are_the_same(guides, guide):
    rng = random.Random(5)
    for seed in range(6):
        stepwise, at_once, guessing = followed(guides, guide, size=3)
        output, expected = walk(guides, stepwise, seed)
        for count in rng.sample(range(len(expected)), min(5, len(expected))):
            assert allowed(mask(guides, at_once, output[:count])) == expected[count]
        known = 0
        while known < len(expected):
            right = output[known : known + rng.randrange(4)]
            wrong = [rng.randrange(4096) for _ in range(rng.randrange(3))]
            drafts = [*right, *wrong]
            rows = [MaskRequest(guessing, output, known, drafts[:i], True) for i in range(len(drafts) + 1)]
            found = masked(guides, *rows)
            for i in range(len(right) + 1):
                if known + i < len(expected):
                    assert allowed(found[i]) == expected[known + i]
            known += 1 + rng.randrange(len(right) + 1)


def test_a_promised_token_that_was_another(guides):
    (sequence,) = followed(guides, regex("a[bc]{2}d"))
    a, b, c, x = (ids(each)[0] for each in "abcx")
    assert mask(guides, sequence, [a], [x]).allowed is None
    assert mask(guides, sequence, [a], [END]).allowed is None
    expected = allowed(mask(guides, sequence, [a], [b]))
    assert allowed(mask(guides, sequence, [a, c])) == expected
    assert allowed(mask(guides, sequence, [a, c], [b])) == allowed(mask(guides, sequence, [a, b, c]))


def test_tokens_that_do_not_match_it(guides):
    (sequence,) = followed(guides, regex("[0-9]+"))
    found = mask(guides, sequence, [*ids("1"), *ids("x")])
    assert found.fault.error_code is ErrorCode.INVALID_ARGUMENT
    assert found.fault.field == "spec.guided.regex"
    assert found.fault.message == "the tokens so far do not match it, from token 1 on"


def test_a_killed_worker_is_replaced(own):
    sequences = followed(own, SCHEMA, size=4)
    walks = [walk(own, sequence, seed) for seed, sequence in enumerate(sequences)]
    for count in (0, 3, 7):
        os.kill(own._processes.current().pid, signal.SIGKILL)
        rows = [
            MaskRequest(sequence, output, min(count, len(output)), (), True)
            for sequence, (output, _) in zip(sequences, walks, strict=True)
        ]
        for row, found, (_, masks) in zip(rows, masked(own, *rows), walks, strict=True):
            assert allowed(found) == masks[row.known]
    assert own._processes.forks == 4


def test_a_new_worker_compiles_one_guide_for_a_step_and_the_others_beside_it(own):
    sequences = [followed(own, regex(text), size=2) for text in ("[ab]+", "[cd]+", "[ef]+")]
    rows = [MaskRequest(each, [], 0, (), True) for pair in zip(*sequences, strict=True) for each in pair]
    expected = list(map(allowed, masked(own, *rows)))
    os.kill(own._processes.current().pid, signal.SIGKILL)
    found = masked_so_far(own, *rows)
    assert [each.later for each in found] == [False, True, True] * 2
    assert [allowed(found[i]) for i in (0, 3)] == [expected[i] for i in (0, 3)]
    assert all(each.fault is None and not each.complete for each in found)
    assert own.prepare(sequences[1][0].guide) is not None
    assert list(map(allowed, masked(own, *rows))) == expected
    assert own._processes.forks == 2


def stand_still(worker: WorkerLink) -> None:
    """And be waited for for a second; the next worker may take longer."""
    os.kill(worker.pid, signal.SIGSTOP)
    with socket.socket(fileno=os.dup(worker.steps.fileno())) as end:
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", 1, 0))


def test_a_worker_that_stands_still_is_replaced(own):
    (sequence,) = followed(own, regex("[ab]+"))
    expected = allowed(mask(own, sequence, ids("a")))
    stand_still(own._processes.current())
    assert allowed(mask(own, sequence, ids("a"))) == expected
    assert own._processes.forks == 2


def test_masks_that_nobody_collected(own):
    """The step failed after it had asked."""
    (sequence,) = followed(own, regex("a[bc]d"), ends=())
    expected = allowed(mask(own, sequence, [], ids("a")))
    own.masks.request([MaskRequest(sequence, ids("a"), 1, ids("b"), True)])
    assert allowed(mask(own, sequence, ids("a"))) == expected


def test_a_killed_template_is_replaced(own):
    (sequence,) = followed(own, regex("[ab]+"))
    expected = allowed(mask(own, sequence, ids("a")))
    template = own._processes.template()
    os.kill(template.pid, signal.SIGKILL)
    template._process.wait()
    assert allowed(mask(own, sequence, ids("a"))) == expected
    (other,) = followed(own, regex("[cd]+"))
    assert {"c", "d"} <= texts(mask(own, other, []))


def test_one_that_grows_without_bound_ends_alone_and_is_remembered():
    guides = make(guided_mask_seconds=0.02)
    hostile = Guide(GuideKind.EBNF, 'root ::= root root | "a" | "" | root root root')
    (culprit,), neighbours = followed(guides, hostile), followed(guides, SCHEMA, size=3)
    walks = [walk(guides, sequence, seed) for seed, sequence in enumerate(neighbours)]
    worker, output = guides._processes.current().pid, []
    try:
        for step in range(400):
            rows = [
                MaskRequest(each, tokens, step % len(masks), (), True)
                for each, (tokens, masks) in zip(followed(guides, SCHEMA, size=3), walks, strict=True)
            ]
            first, *others = masked(guides, MaskRequest(culprit, output, len(output), (), True), *rows)
            assert [allowed(each) for each in others] == [walks[i][1][step % len(walks[i][1])] for i in range(3)]
            if first.fault is not None:
                break
            output += ids("a")
        assert first.fault.error_code is ErrorCode.GUIDE_TOO_COMPLEX
        assert "guided_mask_seconds" in first.fault.message
        assert guides.prepare(hostile).fault == first.fault
        assert prepared(guides, SCHEMA) is None
        # Once, and its memory is back.
        assert guides._processes.forks == 2
        assert not Path(f"/proc/{worker}").exists()
    finally:
        guides.close()


def test_a_worker_that_dies_before_it_has_answered_all(own, monkeypatch):
    """A new worker knows the tokens of one sequence and asks for those of the other; then it dies, too."""
    first, second = followed(own, regex("[a-z]+"))[0], followed(own, regex("[0-9]+"))[0]
    letters, digits = ids("abc"), ids("123")
    rows = [MaskRequest(first, letters, len(letters), (), True), MaskRequest(second, digits, len(digits), (), True)]
    expected = list(map(allowed, masked(own, *rows)))
    os.kill(own._processes.current().pid, signal.SIGKILL)
    assert allowed(mask(own, first, letters)) == expected[0]
    sent, send = [], own.masks._send

    def send_and_kill(link, rows):
        sent.append([row.slot for row in rows])
        if len(sent) == 2:
            os.kill(link.pid, signal.SIGKILL)
        send(link, rows)

    monkeypatch.setattr(own.masks, "_send", send_and_kill)
    assert list(map(allowed, masked(own, *rows))) == expected
    # Further ones: a worker that died last compiles one guide for a step.
    assert sent[:3] == [[0, 1], [1], [0, 1]]


def test_a_worker_that_reads_nothing_is_replaced(own):
    (sequence,) = followed(own, regex("[0-9]+"))
    # More than the socket holds.
    tokens = ids("1") * 150_000
    stand_still(own._processes.current())
    assert allowed(mask(own, sequence, tokens)) == allowed(mask(own, sequence, ids("1")))
    assert own._processes.forks == 2


def test_numbers_are_taken_once_by_two_threads():
    numbers = deque(range(20_000))
    found = [[], []]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=lambda into=into: into.extend(take_all(numbers))) for into in found]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(found[0] + found[1]) == list(range(20_000))
