"""Draft tokens with logits change how tokens are sampled, in the same way for any number of drafts per step."""

import pytest

from sluice.wire.params import DraftLogits, Speculation
from tests.fakes.engine import EngineBench
from tests.fakes.scripted_tokens import VOCAB, continuation, draft_logits

PROMPT = [1, 2, 3]
DRAFT = tuple((7 * i + 2) % VOCAB for i in range(24))

pytestmark = pytest.mark.usefixtures("both_overlaps")


def speculation(most: int | None, threshold: float | None = None, draft=DRAFT) -> Speculation:
    return Speculation(most, draft, draft_logits(len(draft)), threshold)


def following(seeds) -> int:
    """A seed whose output follows the draft for some tokens, which it would not without logits."""
    return max(seeds, key=lambda seed: followed(seed, speculation(0)))


def followed(seed: int, speculation: Speculation) -> int:
    sampled = continuation(PROMPT, spec_stopping(), seed, 0, speculation)
    return next((i for i, (a, b) in enumerate(zip(sampled, DRAFT, strict=False)) if a != b), len(DRAFT))


def spec_stopping():
    bench = EngineBench()
    return bench.specs[bench.submit(PROMPT, max_tokens=30), 0].stopping


@pytest.mark.parametrize("most", [0, 1, 5, None])
@pytest.mark.parametrize("threshold", [None, 0.5])
def test_the_number_of_drafts_does_not_change_the_tokens(most, threshold):
    bench = EngineBench()
    seeds = range(12)
    requests = [
        bench.submit(PROMPT, max_tokens=30, seed=seed, n=1 + seed % 2, speculation=speculation(most, threshold))
        for seed in seeds
    ]
    bench.run()
    for request in requests:
        for sequence in range(bench.specs[request, 0].n):
            assert bench.output(request, sequence) == bench.expected(request, sequence)
    assert any(followed(seed, speculation(0, threshold)) > 3 for seed in seeds)
    assert followed(0, Speculation(0, DRAFT)) == 0


def test_a_resume_within_the_draft():
    seed = following(range(40))
    whole = continuation(PROMPT, spec_stopping(), seed, 0, speculation(0))
    for known in range(len(whole)):
        bench = EngineBench()
        request = bench.submit(
            PROMPT, max_tokens=30, seed=seed, resume={0: whole[:known]}, speculation=speculation(known % 4)
        )
        bench.run()
        assert bench.output(request) == whole


def test_a_step_overlaps_again_once_the_draft_is_over():
    bench = EngineBench(overlap=True)
    request = bench.submit(PROMPT, max_tokens=30, speculation=speculation(0, draft=DRAFT[:2]))
    overlapping = 0
    while bench.step():
        decides = [step.decides_next for step in bench.engine._in_flight]
        overlapping += decides == [False]
    assert overlapping >= 27
    bench.run()
    assert bench.output(request) == bench.expected(request)
    draws = [draw for step in bench.runner.steps for part in step.slices for draw in part.draws]
    assert 1 <= sum(draw.proposal is not None for draw in draws) <= 2


@pytest.mark.parametrize(
    "logits",
    [DraftLogits("float32", b"\0" * 4), DraftLogits("float32", b"\0\0\xc0\x7f" * VOCAB * len(DRAFT))],
    ids=["size", "NaN"],
)
def test_invalid_logits_are_refused(logits):
    bench = EngineBench()
    neighbour = bench.submit([4, 5])
    request = bench.submit(PROMPT, speculation=Speculation(None, DRAFT, logits))
    bench.run()
    fault = bench.stream(request).end.fault
    assert (fault.code, fault.field) == ("INVALID_ARGUMENT", "spec.speculation.draft_logits.data")
    assert bench.output(neighbour) == bench.expected(neighbour)
