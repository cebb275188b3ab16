"""Tensor-parallel ranks return the tokens and log-probabilities of a single rank."""

from contextlib import closing

import pytest
from msgspec.structs import replace

from engine_worker.guided.guides import Guides
from engine_worker.guided.processes import GuideModel
from sluice import tiny_model
from sluice.checkpoint.folder import open_checkpoint
from sluice.settings.engine import GuideLimits
from sluice.wire.params import Guide, GuideKind, SamplingParams, Speculation, StopParams
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.fakes.drafting import proposing
from tests.parity.harness import EngineHarness

GUIDE = Guide(GuideKind.REGEX, "([a-z]{2,5} = [0-9]+\n){9}")
KINDS = [
    {"temperature": 0.0},
    {"temperature": 0.7},
    {"top_p": 0.9, "temperature": 0.8},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
    {"no_repeat_ngram_size": 2, "temperature": 0.0},
]


def generate(folder, vocabulary: int, speculation: Speculation = Speculation(), **options) -> list:  # noqa: B008
    """Run requests of every kind, one of them with three sequences. Returns their tokens and log-probabilities."""
    harness = EngineHarness(folder, kv_cache_tokens=2048, max_batch_size=16, max_tokens_per_step=48, **options)
    try:
        numbers = [
            harness.send(
                [(7 * i + 3 * j) % vocabulary for j in range(5 + 13 * i)],
                SamplingParams(seed=i, logprobs=2, **KINDS[i % len(KINDS)]),
                StopParams(max_tokens=6 + i),
                n=3 if i == 5 else 1,
                speculation=speculation,
                guide=GUIDE if "guides" in options else None,
            )
            for i in range(8)
        ]
        harness.run()
        streams = [
            harness.stream(number, index) for i, number in enumerate(numbers) for index in range(1 + 2 * (i == 5))
        ]
        return [(stream.tokens, [entry.logprob for entry in stream.logprobs]) for stream in streams]
    finally:
        harness.close()


def check(folder, vocabulary: int, size: int = 2, **options) -> None:
    """Compare `size` ranks with one."""
    expected = generate(folder, vocabulary, **options)
    compare(generate(folder, vocabulary, tensor_parallel=size, **options), expected)


def compare(actual: list, expected: list) -> None:
    for (tokens, logprobs), (right_tokens, right_logprobs) in zip(actual, expected, strict=True):
        assert tokens == right_tokens
        assert logprobs == pytest.approx(right_logprobs, abs=1e-3)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True], ids=["", "overlap"])
def test_two_ranks_run_the_tiny_model(overlap):
    """A Qwen3 with tied embeddings and two KV heads, one for each rank."""
    check(tiny_model.path(), 4096, overlap=overlap)


@pytest.mark.long
def test_draft_tokens_change_no_token_of_two_ranks():
    """Half of the draft tokens are wrong."""
    expected = generate(tiny_model.path(), 4096)
    drafts = tuple(token + i % 2 for i, token in enumerate(expected[6][0]))
    actual = generate(tiny_model.path(), 4096, Speculation(4, drafts), tensor_parallel=2, max_draft_batch=16)
    compare(actual, expected)


@pytest.mark.long
def test_two_ranks_accept_the_draft_tokens_with_logits_that_one_accepts():
    """Only rank 0 samples, so that draft logits are not sent to other ranks."""
    draft = generate(tiny_model.path(), 4096)[6][0]
    drafts = proposing(draft, 4096, 3)
    expected = generate(tiny_model.path(), 4096, drafts)
    options = {"tensor_parallel": 2, "max_draft_batch": 16, "overlap": True}
    actual = generate(tiny_model.path(), 4096, replace(drafts, max_draft_tokens=4), **options)
    compare(actual, expected)


@pytest.mark.long
def test_two_ranks_run_guided_requests():
    checkpoint = open_checkpoint(str(tiny_model.path()))
    with closing(Guides(GuideModel.of(checkpoint), GuideLimits())) as guides:
        check(tiny_model.path(), checkpoint.vocab_size, guides=guides)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama, biased, linear rope", {"kv_host_memory": 1 << 20, "attention": "reference"}),
        # A mixture of experts whose only KV head both ranks have.
        ("qwen3 moe, half sparse, windowed", {"overlap": True}),
    ],
)
def test_two_ranks_run_random_models(tmp_path, name, options):
    """Their vocabulary has 97 tokens, so that the second rank has one row of padding."""
    write_checkpoint(tmp_path, CONFIGS[name])
    check(tmp_path, 97, **options)


@pytest.mark.long
def test_ranks_may_outnumber_kv_heads(tmp_path):
    """Four ranks share two KV heads."""
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    check(tmp_path, 97, size=4)
