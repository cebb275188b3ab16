"""Prompt tables: outputs equal those of transformers' `inputs_embeds` and of peft's prompt tuning."""

from contextlib import closing
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice import tiny_model
from sluice.wire.params import BeamSearchParams, SamplingParams, Speculation, StopParams
from sluice.wire.tables import PromptTables, Table
from sluice.wire.tensors import TensorParams
from tests.engine_worker.models.checkpoints import write_checkpoint
from tests.engine_worker.models.foreign import ADAPTED
from tests.fakes.tables import table_of
from tests.parity.harness import EngineHarness
from tests.parity.tables_oracle import GREEDY, MAX_TOKENS, STOPPING, Oracle

pytestmark = [pytest.mark.timeout(600), pytest.mark.one_model]
BACKENDS = ["torch", "openvino"]


@pytest.fixture(scope="module")
def oracle(model_folder) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))


def tables(*rows: torch.Tensor) -> PromptTables:
    return PromptTables(tuple(map(table_of, rows)))


def submit(harness: EngineHarness, prompt: list[int], *rows: torch.Tensor, **options) -> int:
    return harness.send(prompt, **({"sampling": GREEDY, "stopping": STOPPING} | options), tables=tables(*rows))


def tokens_of(harness: EngineHarness, number: int, sequence: int = 0) -> list[int]:
    harness.run()
    return harness.stream(number, sequence).tokens


def mixed(oracle: Oracle, prompts: list[list[int]], size: int) -> list[int]:
    """A prompt with virtual tokens at its start, within, and at its end."""
    text, first = prompts[12][:size], oracle.vocab_size
    return [first, first + 1, *text[: size // 2], first + 2, first + 3, first + 2, *text[size // 2 :], first + 4]


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("torch", torch.float32),
        ("torch", torch.float16),
        ("torch", torch.bfloat16),
        ("openvino", torch.float16),
        pytest.param("openvino", torch.float32, marks=pytest.mark.long),
        pytest.param("openvino", torch.bfloat16, marks=pytest.mark.long),
    ],
)
def test_virtual_tokens_may_be_anywhere_in_a_prompt(model_folder, prompts, oracle, backend, dtype):
    rows = oracle.rows(50, seed=1).to(dtype)
    virtual = range(oracle.vocab_size, oracle.vocab_size + 50)
    with_rows = [
        [*virtual[:8], *prompts[11][:40]],
        list(virtual),
        mixed(oracle, prompts, 60),
        [virtual[3]],
        [*virtual[:16], prompts[11][0]],
    ]
    harness = EngineHarness(model_folder, backend=backend)
    numbers = [submit(harness, prompt, rows) for prompt in with_rows]
    plain = harness.send(prompts[11][:40], GREEDY, STOPPING)
    harness.run()
    for prompt, number in zip(with_rows, numbers, strict=True):
        assert harness.stream(number).tokens == oracle.generate(prompt, rows), prompt
    alone = EngineHarness(model_folder, backend=backend)
    assert harness.stream(plain).tokens == tokens_of(alone, alone.send(prompts[11][:40], GREEDY, STOPPING))


def test_several_tables_are_joined(model_folder, prompts, oracle):
    rows = oracle.rows(9, seed=2)
    prompt = [oracle.vocab_size + i for i in (8, 3, 0, 4, 5)] + prompts[13][:20]
    harness = EngineHarness(model_folder)
    numbers = [submit(harness, prompt, *rows.split(sizes)) for sizes in ([9], [4, 5], [1, 3, 1, 4])]
    harness.run()
    assert [harness.stream(number).tokens for number in numbers] == [oracle.generate(prompt, rows)] * 3


@pytest.mark.long
@pytest.mark.parametrize(
    ("overlap", "backend"),
    [
        (True, "openvino"),
        pytest.param(True, "torch", marks=pytest.mark.long),
        pytest.param(False, "openvino", marks=pytest.mark.long),
        pytest.param(False, "torch", marks=pytest.mark.long),
    ],
)
def test_chunks_may_end_anywhere(model_folder, prompts, oracle, backend, overlap):
    """Chunks may also end between virtual tokens."""
    rows, prompt = oracle.rows(5, seed=3), mixed(oracle, prompts, 14)
    expected = oracle.generate(prompt, rows)
    # OpenVINO's graphs take a while to compile, so only chunks that end next to virtual tokens are tried with it.
    for chunk in range(1, len(prompt) + 2) if backend == "torch" else (1, 2, 3, 9, 11, 12):
        harness = EngineHarness(
            model_folder,
            backend=backend,
            overlap=overlap,
            max_tokens_per_step=chunk,
            max_batch_size=1,
            tokens_per_block=8,
            kv_cache_tokens=2048,
        )
        assert tokens_of(harness, submit(harness, prompt, rows)) == expected, chunk


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_tables_share_blocks_and_others_do_not(model_folder, prompts, oracle, backend):
    """Text before the virtual tokens is shared too."""
    size = 16 if backend == "torch" else 32
    text, virtual = prompts[14][: 2 * size], [oracle.vocab_size + i for i in range(2 * size)]
    prompt = [*text, *virtual, *prompts[15][:5]]
    first, second = (oracle.rows(2 * size, seed) for seed in (4, 5))
    # Differs only in its last row.
    similar = first.clone()
    similar[-1] += 1
    harness = EngineHarness(model_folder, backend=backend)
    for rows, cached in ((first, 0), (second, 2), (similar, 2), (first, 4), (second, 4)):
        number = submit(harness, prompt, rows)
        assert tokens_of(harness, number) == oracle.generate(prompt, rows)
        assert harness.cached_tokens(number) == cached * size


@pytest.mark.parametrize(
    "options",
    [*(pytest.param(options, marks=pytest.mark.long) for options in ({}, {"backend": "openvino"})), {"overlap": True}],
    ids=str,
)
def test_preemptions_change_no_token(model_folder, prompts, oracle, options):
    harness = EngineHarness(model_folder, kv_cache_tokens=384, max_tokens_per_step=48, max_batch_size=8, **options)
    with_rows = [(mixed(oracle, prompts, 40 + 9 * i), oracle.rows(5, seed=i)) for i in range(6)]
    numbers = [submit(harness, prompt, rows, stopping=StopParams(60)) for prompt, rows in with_rows]
    harness.run()
    assert harness.pauses > 0
    for (prompt, rows), number in zip(with_rows, numbers, strict=True):
        assert harness.stream(number).tokens == oracle.generate(prompt, rows, max_new_tokens=60)


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_with_several_outputs_can_resume(model_folder, prompts, oracle, backend):
    rows, prompt = oracle.rows(5, seed=6), mixed(oracle, prompts, 30)
    sampling = SamplingParams(seed=3, temperature=0.8, repetition_penalty=1.2, no_repeat_ngram_size=3)
    first = EngineHarness(model_folder, backend=backend)
    number = submit(first, prompt, rows, sampling=sampling, n=3)
    first.run()
    streams = [first.stream(number, i).tokens for i in range(3)]
    assert len(set(map(tuple, streams))) == 3
    for count in (1, 7):
        harness = EngineHarness(model_folder, backend=backend, max_tokens_per_step=8, max_batch_size=4)
        resume = {i: tokens[:count] for i, tokens in enumerate(streams[:2])}
        resumed = submit(harness, prompt, rows, sampling=sampling, n=3, resume=resume)
        harness.run()
        assert [harness.stream(resumed, i).tokens for i in range(3)] == streams


def test_beam_search_equals_transformers(model_folder, prompts, oracle):
    rows, prompt = oracle.rows(5, seed=7), mixed(oracle, prompts, 30)
    harness = EngineHarness(model_folder, max_tokens_per_step=16, max_batch_size=8)
    beams = SamplingParams(temperature=1.0, logprobs=0, beam_search=BeamSearchParams(4))
    number = submit(harness, prompt, rows, sampling=beams, n=2)
    harness.run()
    expected = oracle.generate(prompt, rows, num_beams=4, num_return_sequences=1)
    assert harness.stream(number).tokens == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_tokens_change_no_token(prompts, overlap):
    """The prompt contains repetitions around virtual tokens, which are never draft tokens."""
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32))
    rows = oracle.rows(5, seed=8)
    line, virtual = prompts[16][:9], [oracle.vocab_size + i for i in range(5)]
    prompt = [*line, *virtual, *line, *virtual[:2], *line, *line]
    harness = EngineHarness(tiny_model.path(), overlap=overlap)
    number = submit(harness, prompt, rows, stopping=StopParams(40), speculation=Speculation(4))
    assert tokens_of(harness, number) == oracle.generate(prompt, rows, max_new_tokens=40)
    assert harness.engine.stats.draft_tokens > 0


def test_a_draft_model_serves_only_requests_without_tables(prompts):
    """A draft model has no embeddings for virtual tokens."""
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32))
    rows, prompt = oracle.rows(5, seed=13), mixed(oracle, prompts, 30)
    harness = EngineHarness(tiny_model.path(), draft_model=tiny_model.path())
    plain = harness.send(prompts[16][:30], GREEDY, StopParams(40), speculation=Speculation(4))
    number = submit(harness, prompt, rows, stopping=StopParams(40), speculation=Speculation(4))
    assert tokens_of(harness, number) == oracle.generate(prompt, rows, max_new_tokens=40)
    assert len(harness.stream(plain).tokens) == 40
    assert sum(step.draft_tokens for step in harness.steps) > 0


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_rules_do_not_count_virtual_tokens(model_folder, prompts, oracle, sampling):
    """Penalties and n-gram rules apply to the text of the prompt alone."""
    rows, text = oracle.rows(4, seed=9), prompts[17][:30]
    prompt = [*range(oracle.vocab_size, oracle.vocab_size + 4), *text]
    harness = EngineHarness(model_folder)
    number = submit(harness, prompt, rows, sampling=SamplingParams(temperature=0.0, **sampling))
    expected: list[int] = []
    for _ in range(MAX_TOKENS):
        expected.append(_next(oracle, prompt, text, expected, rows, sampling))
    assert tokens_of(harness, number) == expected


@torch.inference_mode()
def _next(oracle: Oracle, prompt: list[int], text: list[int], output: list[int], rows, sampling: dict) -> int:
    logits = oracle.model(inputs_embeds=oracle.embed([*prompt, *output], rows)).logits[0, -1]
    known = [*text, *output]
    if "repetition_penalty" in sampling:
        seen = torch.tensor(sorted(set(known)))
        values, penalty = logits[seen], sampling["repetition_penalty"]
        logits[seen] = torch.where(values < 0, values * penalty, values / penalty)
    else:
        pairs = pairwise(known)
        logits[[after for before, after in pairs if before == known[-1]]] = -torch.inf
    return int(logits.argmax())


def test_context_logits_include_virtual_positions(model_folder, prompts, oracle):
    rows, prompt = oracle.rows(5, seed=10), mixed(oracle, prompts, 20)
    harness = EngineHarness(model_folder, max_tokens_per_step=7, max_batch_size=1)
    number = submit(harness, prompt, rows, tensors=TensorParams(context=("context_logits",)))
    harness.run()
    with torch.inference_mode():
        expected = oracle.model(inputs_embeds=oracle.embed(prompt, rows)).logits[0]
    logits = harness.tensor(number, "context_logits", context=True)
    torch.testing.assert_close(logits, expected, atol=1e-3, rtol=1e-3)


@pytest.mark.long
def test_two_ranks_return_the_same_tokens(model_folder, prompts, oracle):
    rows, prompt = oracle.rows(5, seed=11), mixed(oracle, prompts, 30)
    with closing(EngineHarness(model_folder, tensor_parallel=2, max_tokens_per_step=16, max_batch_size=4)) as harness:
        assert tokens_of(harness, submit(harness, prompt, rows)) == oracle.generate(prompt, rows)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "phi3"])
def test_models_of_the_adapter_take_tables(tmp_path, name):
    oracle = Oracle(write_checkpoint(tmp_path, ADAPTED[name]))
    rows = oracle.rows(5, seed=12)
    virtual = [oracle.vocab_size + i for i in range(5)]
    prompt = [*virtual[:2], *range(3, 30), *virtual[2:]]
    harness = EngineHarness(tmp_path, max_tokens_per_step=9, max_batch_size=2, kv_cache_tokens=1024)
    assert tokens_of(harness, submit(harness, prompt, rows)) == oracle.generate(prompt, rows)


def test_a_model_whose_embeddings_have_another_size_takes_no_tables(tmp_path):
    """OPT's decoder projects embeddings to the hidden size."""
    write_checkpoint(tmp_path, ADAPTED["opt"])
    harness = EngineHarness(tmp_path)
    assert harness.engine.intake._limits.hidden_size == 0
    number = submit(harness, [97, 3], torch.ones(1, 48))
    harness.run()
    assert "does not support prompt tables" in harness.stream(number).end.fault.message


def test_a_tuned_prompt_equals_peft(prompts, tmp_path):
    peft = pytest.importorskip("peft")
    base = AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=7)
    torch.manual_seed(1)
    tuned = peft.get_peft_model(base, config).eval()
    with torch.no_grad():
        rows = tuned.get_prompt(1)[0].clone()
    text = prompts[18][:25]
    ids = torch.tensor([text])
    tuned.generation_config.eos_token_id = None
    with torch.inference_mode():
        expected = tuned.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False
        )[0, len(text) :].tolist()
    harness = EngineHarness(tiny_model.path())
    first = base.config.vocab_size
    assert tokens_of(harness, submit(harness, [*range(first, first + 7), *text], rows)) == expected


HIDDEN_SIZE, VOCABULARY = 256, 4096
"""Sizes of the tiny model."""
GOOD_TABLE = table_of(torch.ones(3, HIDDEN_SIZE))
GOOD_PROMPT = [VOCABULARY, VOCABULARY + 2, 5]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": Table(bytes(16), 3, GOOD_TABLE.data, HIDDEN_SIZE, "float32")}, "digest"),
        ({"table": table_of(torch.ones(3, HIDDEN_SIZE - 1))}, "hidden size"),
        ({"prompt": [VOCABULARY, VOCABULARY + 3, 5]}, "token ids"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"extra_ids": (1,)}, "extra_ids"),
    ],
    ids=["digest", "hidden size", "token id", "prompt_logprobs", "extra_ids"],
)
def test_malformed_tables_are_refused(prompts, changes, message):
    harness = EngineHarness(tiny_model.path())
    options = {"prompt": GOOD_PROMPT, "table": GOOD_TABLE, "extra_ids": (), "prompt_logprobs": None} | changes
    tables = PromptTables((options["table"],), options["extra_ids"])
    number = harness.send(
        options["prompt"], GREEDY, STOPPING, tables=tables, prompt_logprobs=options["prompt_logprobs"]
    )
    plain = harness.send(prompts[3], GREEDY, STOPPING)
    harness.run()
    fault = harness.stream(number).end.fault
    assert fault.code == "INVALID_ARGUMENT"
    assert message in fault.message
    assert len(harness.stream(plain).tokens) == MAX_TOKENS
