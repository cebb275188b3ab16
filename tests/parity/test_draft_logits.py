"""Draft tokens with logits change the output. How many are drafted in a step does not: tokens are those of an engine
that computes one at a time. They still follow the request's own distribution."""

import pytest
import torch
from msgspec.structs import replace

from engine_worker.guided.guides import Guides
from engine_worker.guided.processes import Model
from sluice import tiny_model
from sluice.client.draft_logits import pack_draft_logits
from sluice.ring.checkpoint import open_checkpoint
from sluice.ring.params import DraftLogits, Guide, GuideKind, SamplingParams, Speculation, StopParams
from sluice.settings.engine import GuideLimits
from tests.engine_worker.guided.tools import prepared
from tests.engine_worker.sampling.test_distribution import assert_follows
from tests.fakes.drafting import proposing
from tests.parity.harness import EngineHarness
from tests.parity.test_speculation import ENDS, WORDS, check, run

VOCABULARY = 4096
MAX_TOKENS = 40
GUIDE = Guide(GuideKind.REGEX, "([a-z]{2,5} = [0-9]+\n){9}")
KINDS = {
    "seeded": {"temperature": 0.7},
    "filtered": {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.02},
    "penalties": {"temperature": 0.6, "repetition_penalty": 1.05, "presence_penalty": 0.1, "frequency_penalty": 0.05},
    "n-grams": {"temperature": 0.6, "no_repeat_ngram_size": 5, "bad_words": WORDS},
    "ends": {"temperature": 0.9},
    "bias": {"temperature": 0.5, "logit_bias": ((5, 3.0),), "bad_token_ids": (11,)},
    "guided": {"temperature": 0.8},
    "greedy": {"temperature": 0.0},
}


def requests(prompts) -> list[dict]:
    found = []
    for i in range(2 * len(KINDS)):
        kind = list(KINDS)[i % len(KINDS)]
        more = {"min_tokens": 10, "stop_token_ids": ENDS} if kind == "ends" else {}
        found.append(
            {
                "prompt": prompts[12 + i][:60],
                "sampling": SamplingParams(seed=i, logprobs=1, **KINDS[kind]),
                "stopping": StopParams(MAX_TOKENS, **more),
                "n": 1 + (i % 5 == 0),
                "guide": GUIDE if kind == "guided" else None,
            }
        )
    return found


@pytest.fixture(scope="module")
def guides():
    guides = Guides(Model.of(open_checkpoint(str(tiny_model.path()))), GuideLimits())
    assert prepared(guides, GUIDE) is None
    yield guides
    guides.close()


@pytest.fixture(scope="module")
def plain(guides, prompts):
    """What is asked, with what drafts, and what comes of it if tokens are computed one at a time. The drafts are what
    comes without logits, with an error at the end."""
    asked = requests(prompts)
    harness = EngineHarness(tiny_model.path(), guides=guides)
    without = run(harness, asked, [Speculation()] * len(asked))
    firsts = [sum(each["n"] for each in asked[:i]) for i in range(len(asked))]
    drafts = [[*without[first][0][: 30 - i], 7] for i, first in enumerate(firsts)]
    speculations = [
        proposing(tokens, VOCABULARY, i, threshold=[None, None, 0.25][i % 3]) for i, tokens in enumerate(drafts)
    ]
    expected = run(harness, asked, speculations)
    followed = [_same(expected[first][0], tokens) for first, tokens in zip(firsts, drafts, strict=True)]
    assert sum(followed) > 100
    # The output does change, unless it is greedy.
    tokens = zip(list(KINDS) * 2, ((expected[first][0], without[first][0]) for first in firsts), strict=True)
    changed = {kind for kind, (found, former) in tokens if found != former}
    assert changed == KINDS.keys() - {"greedy"}
    return asked, speculations, expected


def _same(output, draft) -> int:
    return next((i for i, (a, b) in enumerate(zip(output, draft, strict=False)) if a != b), len(draft))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"overlap": True},
        {"kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8, "overlap": True},
        {"backend": "openvino"},
        {"block_reuse": False, "max_batch_size": 3},
    ],
    ids=["roomy", "overlap", "pauses, small chunks, overlap", "openvino", "uncached, few at a time"],
)
@pytest.mark.parametrize("most", [0, 1, 7])
def test_the_same_tokens_however_many_are_drafted(guides, plain, options, most):
    asked, speculations, expected = plain
    harness = EngineHarness(tiny_model.path(), guides=guides, max_draft_batch=64, **options)
    check(run(harness, asked, [replace(each, max_draft_tokens=most) for each in speculations]), expected)
    assert (harness.engine.stats.accepted_draft_tokens > 100) == (most > 0)
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


@pytest.mark.parametrize("most", [0, 5])
def test_resumed_on_another_engine_in_the_middle(guides, plain, most):
    """What a death in the midst of the draft comes to."""
    asked, speculations, expected = plain
    harness = EngineHarness(tiny_model.path(), guides=guides, max_draft_batch=64, max_tokens_per_step=128)
    numbers, at = [], 0
    for i, each in enumerate(asked):
        parts = [expected[at + sequence][0] for sequence in range(each["n"])]
        resume = {k: tokens[: (2 + 3 * i + 5 * k) % min(len(tokens), 25)] for k, tokens in enumerate(parts)}
        speculation = replace(speculations[i], max_draft_tokens=most)
        numbers.append((harness.send(**each, resume=resume, speculation=speculation), at, each["n"]))
        at += each["n"]
    harness.run()
    for number, first, n in numbers:
        for sequence in range(n):
            stream = harness.stream(number, sequence)
            assert (stream.tokens, stream.end.reason) == expected[first + sequence][:2]


LIKELY = SamplingParams(top_k=6, temperature=1.5)
"""Few tokens, so that each pair of them comes often enough."""


def chances(harness: EngineHarness, prompt: list[int]) -> dict[int, float]:
    """Of the next token."""
    number = harness.send(prompt, replace(LIKELY, logprobs=LIKELY.top_k), StopParams(1))
    harness.run()
    best = harness.stream(number).logprobs[0].top
    values = (torch.tensor([logprob for _, logprob in best]).double() / LIKELY.temperature).softmax(0)
    return dict(zip([token for token, _ in best], values.tolist(), strict=True))


def batched(entries, size: int) -> list[list]:
    entries = list(entries)
    return [entries[i : i + size] for i in range(0, len(entries), size)]


def test_pairs_of_tokens_follow_the_requests_own_distribution(prompts):
    """Accepted or not, what comes behind the first one too (chi-square)."""
    prompt, size, random = prompts[14][:40], 1500, torch.Generator().manual_seed(3)
    harness = EngineHarness(tiny_model.path(), max_draft_batch=64)
    first = chances(harness, prompt)
    pairs = {(a, b): p * q for a, p in first.items() for b, q in chances(harness, [*prompt, a]).items()}
    # A draft that is about right, does not know the likeliest token, and knows one that cannot come.
    rows = torch.full((2, VOCABULARY), -torch.inf)
    for i, (a, b) in enumerate(pairs):
        for row, token in enumerate((a, b)):
            rows[row, token] = rows[row, token].exp().add(pairs[a, b] * (0.3 + i % 3)).log()
    rows[0, next(iter(first))], rows[:, 7] = -torch.inf, -2.0
    drafts = [row.softmax(0).multinomial(size, replacement=True, generator=random).tolist() for row in rows]
    logits = DraftLogits(**pack_draft_logits(rows))
    drawn = []
    # A third token, so that the second one can be drafted: the last token of an output never is.
    for some in batched(enumerate(zip(*drafts, strict=True)), 500):
        numbers = [
            harness.send(prompt, replace(LIKELY, seed=i), StopParams(3), speculation=Speculation(2, draft, logits))
            for i, draft in some
        ]
        harness.run()
        drawn += [tuple(harness.stream(number).tokens[:2]) for number in numbers]
    assert harness.engine.stats.accepted_draft_tokens > 50
    counts = torch.tensor([drawn.count(pair) for pair in pairs])
    assert counts.sum() == size
    assert_follows(counts, torch.tensor(list(pairs.values())))
