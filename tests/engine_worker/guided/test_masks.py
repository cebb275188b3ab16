"""Masks: at the start, step by step, with drafts, at the end, and after the worker has died."""

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
from sluice.wire.errors import ErrorCode
from sluice.wire.params import Guide, GuideKind
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


def test_special_tokens_are_never_text(guides):
    (sequence,) = followed(guides, regex(r"(?s)<\|im_start\|>.*"), ends=())
    special = {4093, 4094, 4095}
    allowed_ids = allowed(mask(guides, sequence, []))
    assert allowed_ids
    assert not allowed_ids & special
    (anything,) = followed(guides, regex("(?s).*"))
    assert allowed(mask(guides, anything, [])) & special == {END}


def test_a_token_that_ends_inside_a_character(guides):
    (sequence,) = followed(guides, regex("[日本]{3}"), ends=())
    tokens = ids("日本日")
    assert len(tokens) > 3
    for count in range(len(tokens)):
        assert tokens[count] in allowed(mask(guides, sequence, tokens[:count]))
    assert mask(guides, sequence, tokens).complete


def walk(guides, sequence, seed: int, max_steps: int = 30) -> tuple[list[int], list[set[int]]]:
    rng, output, masks = random.Random(seed), [], []
    while len(output) < max_steps:
        masks.append(allowed(mask(guides, sequence, output)))
        token = rng.choice(sorted(masks[-1]))
        if token == END:
            break
        output.append(token)
    return output, masks


@pytest.mark.parametrize("guide", [SCHEMA, regex(r"[a-z ]{0,9}(\([0-9]+\))*é"), Guide(GuideKind.JSON_OBJECT)])
def test_masks_are_the_same_step_by_step_together_and_with_drafts(guides, guide):
    rng = random.Random(5)
    for seed in range(6):
        stepwise, together, drafting = followed(guides, guide, size=3)
        output, expected = walk(guides, stepwise, seed)
        for count in rng.sample(range(len(expected)), min(5, len(expected))):
            assert allowed(mask(guides, together, output[:count])) == expected[count]
        known = 0
        while known < len(expected):
            right = output[known : known + rng.randrange(4)]
            wrong = [rng.randrange(4096) for _ in range(rng.randrange(3))]
            drafts = [*right, *wrong]
            rows = [MaskRequest(drafting, output, known, drafts[:i], True) for i in range(len(drafts) + 1)]
            masks = masked(guides, *rows)
            for i in range(len(right) + 1):
                if known + i < len(expected):
                    assert allowed(masks[i]) == expected[known + i]
            known += 1 + rng.randrange(len(right) + 1)


def test_a_promised_token_that_turns_out_differently(guides):
    (sequence,) = followed(guides, regex("a[bc]{2}d"))
    a, b, c, x = (ids(each)[0] for each in "abcx")
    assert mask(guides, sequence, [a], [x]).allowed is None
    assert mask(guides, sequence, [a], [END]).allowed is None
    expected = allowed(mask(guides, sequence, [a], [b]))
    assert allowed(mask(guides, sequence, [a, c])) == expected
    assert allowed(mask(guides, sequence, [a, c], [b])) == allowed(mask(guides, sequence, [a, b, c]))


def test_tokens_that_do_not_match_the_guide(guides):
    (sequence,) = followed(guides, regex("[0-9]+"))
    mismatch = mask(guides, sequence, [*ids("1"), *ids("x")])
    assert mismatch.fault.error_code is ErrorCode.INVALID_ARGUMENT
    assert mismatch.fault.field == "spec.guided.regex"
    assert mismatch.fault.message == "the tokens so far do not match it, from token 1 on"


def test_a_killed_worker_is_replaced(fresh_guides):
    sequences = followed(fresh_guides, SCHEMA, size=4)
    walks = [walk(fresh_guides, sequence, seed) for seed, sequence in enumerate(sequences)]
    for count in (0, 3, 7):
        os.kill(fresh_guides._processes.current().pid, signal.SIGKILL)
        rows = [
            MaskRequest(sequence, output, min(count, len(output)), (), True)
            for sequence, (output, _) in zip(sequences, walks, strict=True)
        ]
        for row, row_mask, (_, masks) in zip(rows, masked(fresh_guides, *rows), walks, strict=True):
            assert allowed(row_mask) == masks[row.known]
    assert fresh_guides._processes.forks == 4


def test_a_new_worker_compiles_one_guide_per_step_and_the_others_in_the_background(fresh_guides):
    sequences = [followed(fresh_guides, regex(text), size=2) for text in ("[ab]+", "[cd]+", "[ef]+")]
    rows = [MaskRequest(each, [], 0, (), True) for pair in zip(*sequences, strict=True) for each in pair]
    expected = list(map(allowed, masked(fresh_guides, *rows)))
    os.kill(fresh_guides._processes.current().pid, signal.SIGKILL)
    masks = masked_so_far(fresh_guides, *rows)
    assert [each.later for each in masks] == [False, True, True] * 2
    assert [allowed(masks[i]) for i in (0, 3)] == [expected[i] for i in (0, 3)]
    assert all(each.fault is None and not each.complete for each in masks)
    assert fresh_guides.prepare(sequences[1][0].guide) is not None
    assert list(map(allowed, masked(fresh_guides, *rows))) == expected
    assert fresh_guides._processes.forks == 2


def stand_still(worker: WorkerLink) -> None:
    """Stop a worker, with a timeout of one second on its sockets; those of the next worker keep the default."""
    os.kill(worker.pid, signal.SIGSTOP)
    with socket.socket(fileno=os.dup(worker.steps.fileno())) as end:
        for limit in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
            end.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", 1, 0))


def test_a_hanging_worker_is_replaced(fresh_guides):
    (sequence,) = followed(fresh_guides, regex("[ab]+"))
    expected = allowed(mask(fresh_guides, sequence, ids("a")))
    stand_still(fresh_guides._processes.current())
    assert allowed(mask(fresh_guides, sequence, ids("a"))) == expected
    assert fresh_guides._processes.forks == 2


def test_masks_that_were_not_collected(fresh_guides):
    """The step that requested the masks has failed."""
    (sequence,) = followed(fresh_guides, regex("a[bc]d"), ends=())
    expected = allowed(mask(fresh_guides, sequence, [], ids("a")))
    fresh_guides.masks.request([MaskRequest(sequence, ids("a"), 1, ids("b"), True)])
    assert allowed(mask(fresh_guides, sequence, ids("a"))) == expected


def test_a_killed_template_is_replaced(fresh_guides):
    (sequence,) = followed(fresh_guides, regex("[ab]+"))
    expected = allowed(mask(fresh_guides, sequence, ids("a")))
    template = fresh_guides._processes.template()
    os.kill(template.pid, signal.SIGKILL)
    template._process.wait()
    assert allowed(mask(fresh_guides, sequence, ids("a"))) == expected
    (other,) = followed(fresh_guides, regex("[cd]+"))
    assert {"c", "d"} <= texts(mask(fresh_guides, other, []))


def test_a_guide_that_grows_without_bound_ends_alone_and_is_remembered():
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
        # The worker was replaced once, and its memory is released.
        assert guides._processes.forks == 2
        assert not Path(f"/proc/{worker}").exists()
    finally:
        guides.close()


def test_a_worker_that_dies_before_it_has_answered_every_request(fresh_guides, monkeypatch):
    """The new worker receives the tokens of one sequence, requests those of the other, and then dies too."""
    first, second = followed(fresh_guides, regex("[a-z]+"))[0], followed(fresh_guides, regex("[0-9]+"))[0]
    letters, digits = ids("abc"), ids("123")
    rows = [MaskRequest(first, letters, len(letters), (), True), MaskRequest(second, digits, len(digits), (), True)]
    expected = list(map(allowed, masked(fresh_guides, *rows)))
    os.kill(fresh_guides._processes.current().pid, signal.SIGKILL)
    assert allowed(mask(fresh_guides, first, letters)) == expected[0]
    sent, send = [], fresh_guides.masks._send

    def send_and_kill(link, rows):
        sent.append([row.slot for row in rows])
        if len(sent) == 2:
            os.kill(link.pid, signal.SIGKILL)
        send(link, rows)

    monkeypatch.setattr(fresh_guides.masks, "_send", send_and_kill)
    assert list(map(allowed, masked(fresh_guides, *rows))) == expected
    # More messages follow, because a new worker compiles one guide per step.
    assert sent[:3] == [[0, 1], [1], [0, 1]]


def test_a_worker_that_does_not_read_is_replaced(fresh_guides):
    (sequence,) = followed(fresh_guides, regex("[0-9]+"))
    # More than the socket holds.
    tokens = ids("1") * 150_000
    stand_still(fresh_guides._processes.current())
    assert allowed(mask(fresh_guides, sequence, tokens)) == allowed(mask(fresh_guides, sequence, ids("1")))
    assert fresh_guides._processes.forks == 2


def test_two_threads_take_each_number_once():
    numbers = deque(range(20_000))
    taken = [[], []]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [Thread(target=lambda into=into: into.extend(take_all(numbers))) for into in taken]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert sorted(taken[0] + taken[1]) == list(range(20_000))
