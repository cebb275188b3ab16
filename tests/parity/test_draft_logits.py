"""Draft tokens with logits: they change the sampled tokens, but not the distribution that these follow.

How many draft tokens a step checks changes nothing: the output equals that of an engine that computes one at a time.
"""

from itertools import product

import pytest
import torch
from msgspec.structs import replace

from engine_worker.guided.guides import Guides
from engine_worker.guided.processes import GuideModel
from sluice import tiny_model
from sluice.checkpoint.folder import open_checkpoint
from sluice.client.values import pack_draft_logits
from sluice.settings.engine import GuideLimits
from sluice.wire.params import DraftLogits, Guide, GuideKind, SamplingParams, Speculation, StopParams
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
    specs = []
    for i in range(2 * len(KINDS)):
        kind = list(KINDS)[i % len(KINDS)]
        stopping = {"min_tokens": 10, "stop_token_ids": ENDS} if kind == "ends" else {}
        specs.append(
            {
                "prompt": prompts[12 + i][:60],
                "sampling": SamplingParams(seed=i, logprobs=1, **KINDS[kind]),
                "stopping": StopParams(MAX_TOKENS, **stopping),
                "n": 1 + (i % 5 == 0),
                "guide": GUIDE if kind == "guided" else None,
            }
        )
    return specs


@pytest.fixture(scope="module")
def guides():
    guides = Guides(GuideModel.of(open_checkpoint(str(tiny_model.path()))), GuideLimits())
    assert prepared(guides, GUIDE) is None
    yield guides
    guides.close()


@pytest.fixture(scope="module")
def plain(guides, prompts):
    """(requests, drafts, outputs) of an engine that computes one token at a time.

    The draft tokens are the output without draft logits, followed by a wrong token.
    """
    specs = requests(prompts)
    harness = EngineHarness(tiny_model.path(), guides=guides)
    without = run(harness, specs, [Speculation()] * len(specs))
    firsts = [sum(spec["n"] for spec in specs[:i]) for i in range(len(specs))]
    drafts = [[*without[first][0][: 30 - i], 7] for i, first in enumerate(firsts)]
    speculations = [
        proposing(tokens, VOCABULARY, i, threshold=[None, None, 0.25][i % 3]) for i, tokens in enumerate(drafts)
    ]
    expected = run(harness, specs, speculations)
    accepted = [_common_prefix(expected[first][0], tokens) for first, tokens in zip(firsts, drafts, strict=True)]
    assert sum(accepted) > 100
    # Draft logits change every output, unless it is greedy.
    pairs = zip(list(KINDS) * 2, ((expected[first][0], without[first][0]) for first in firsts), strict=True)
    changed = {kind for kind, (with_logits, without_logits) in pairs if with_logits != without_logits}
    assert changed == KINDS.keys() - {"greedy"}
    return specs, speculations, expected


def _common_prefix(output, draft) -> int:
    """Number of tokens before the first difference."""
    return next((i for i, (a, b) in enumerate(zip(output, draft, strict=False)) if a != b), len(draft))


ENGINES = {
    "roomy": {},
    "overlap": {"overlap": True},
    "pauses, small chunks, overlap": {
        "kv_cache_tokens": 256, "max_tokens_per_step": 64, "tokens_per_block": 8, "overlap": True,
    },
    "openvino": {"backend": "openvino"},
    "uncached, few at a time": {"block_reuse": False, "max_batch_size": 3},
}  # fmt: skip
FAST = {(0, "roomy"), (1, "openvino"), (7, "overlap"), (7, "pauses, small chunks, overlap")}


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("max_draft_tokens", "name"),
    [
        (count, name) if (count, name) in FAST else pytest.param(count, name, marks=pytest.mark.long)
        for count, name in product((0, 1, 7), ENGINES)
    ],
)
def test_the_number_of_draft_tokens_per_step_changes_no_token(guides, plain, name, max_draft_tokens):
    (specs, speculations, expected), options = plain, ENGINES[name]
    harness = EngineHarness(tiny_model.path(), guides=guides, max_draft_batch=64, **options)
    limited = [replace(speculation, max_draft_tokens=max_draft_tokens) for speculation in speculations]
    check(run(harness, specs, limited), expected)
    assert (harness.engine.stats.accepted_draft_tokens > 100) == (max_draft_tokens > 0)
    assert (harness.pauses > 0) == ("kv_cache_tokens" in options)


@pytest.mark.quick(1)
@pytest.mark.parametrize("max_draft_tokens", [0, 5])
def test_a_request_resumes_on_another_engine_in_the_middle_of_its_draft(guides, plain, max_draft_tokens):
    specs, speculations, expected = plain
    harness = EngineHarness(tiny_model.path(), guides=guides, max_draft_batch=64, max_tokens_per_step=128)
    numbers, first = [], 0
    for i, spec in enumerate(specs):
        outputs = [expected[first + sequence][0] for sequence in range(spec["n"])]
        resume = {k: tokens[: (2 + 3 * i + 5 * k) % min(len(tokens), 25)] for k, tokens in enumerate(outputs)}
        speculation = replace(speculations[i], max_draft_tokens=max_draft_tokens)
        numbers.append((harness.send(**spec, resume=resume, speculation=speculation), first, spec["n"]))
        first += spec["n"]
    harness.run()
    for number, first, n in numbers:
        for sequence in range(n):
            stream = harness.stream(number, sequence)
            assert (stream.tokens, stream.end.reason) == expected[first + sequence][:2]


FEW_CANDIDATES = SamplingParams(top_k=6, temperature=1.5)
"""Few enough tokens that each pair of them occurs often."""


def probabilities(harness: EngineHarness, prompt: list[int]) -> dict[int, float]:
    """Probabilities of the next token under FEW_CANDIDATES."""
    number = harness.send(prompt, replace(FEW_CANDIDATES, logprobs=FEW_CANDIDATES.top_k), StopParams(1))
    harness.run()
    best = harness.stream(number).logprobs[0].top
    values = (torch.tensor([logprob for _, logprob in best]).double() / FEW_CANDIDATES.temperature).softmax(0)
    return dict(zip([token for token, _ in best], values.tolist(), strict=True))


def in_groups(items, size: int) -> list[list]:
    items = list(items)
    return [items[i : i + size] for i in range(0, len(items), size)]


@pytest.mark.long
def test_sampled_pairs_of_tokens_follow_the_distribution_of_the_request(prompts):
    """Compares counts by a chi-square test. Some draft tokens are accepted and some are rejected."""
    prompt, size, random = prompts[14][:40], 1500, torch.Generator().manual_seed(3)
    harness = EngineHarness(tiny_model.path(), max_draft_batch=64)
    first = probabilities(harness, prompt)
    pairs = {(a, b): p * q for a, p in first.items() for b, q in probabilities(harness, [*prompt, a]).items()}
    # The draft distribution is roughly right, but lacks the most likely token and has one that is impossible.
    rows = torch.full((2, VOCABULARY), -torch.inf)
    for i, (a, b) in enumerate(pairs):
        for row, token in enumerate((a, b)):
            rows[row, token] = rows[row, token].exp().add(pairs[a, b] * (0.3 + i % 3)).log()
    rows[0, next(iter(first))], rows[:, 7] = -torch.inf, -2.0
    drafts = [row.softmax(0).multinomial(size, replacement=True, generator=random).tolist() for row in rows]
    logits = DraftLogits(**pack_draft_logits(rows))
    sampled = []
    # Outputs have three tokens so that the second one can be a draft token: the last one never is.
    for group in in_groups(enumerate(zip(*drafts, strict=True)), 500):
        numbers = [
            harness.send(
                prompt, replace(FEW_CANDIDATES, seed=i), StopParams(3), speculation=Speculation(2, draft, logits)
            )
            for i, draft in group
        ]
        harness.run()
        sampled += [tuple(harness.stream(number).tokens[:2]) for number in numbers]
    assert harness.engine.stats.accepted_draft_tokens > 50
    counts = torch.tensor([sampled.count(pair) for pair in pairs])
    assert counts.sum() == size
    assert_follows(counts, torch.tensor(list(pairs.values())))
