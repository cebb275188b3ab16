"""Prompt tables and prompt embeddings: the tokens of transformers' `inputs_embeds` and of peft's prompt tuning, however
the work is cut."""

from contextlib import closing
from itertools import pairwise

import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice import tiny_model
from sluice.ring.params import BeamSearchParams, SamplingParams, Speculation, StopParams
from sluice.ring.tables import PromptTables, Table
from sluice.ring.tensors import TensorParams
from tests.engine_worker.models.checkpoints import write_checkpoint
from tests.engine_worker.models.foreign import ADAPTED
from tests.fakes.tables import table_of
from tests.parity.harness import EngineHarness

pytestmark = pytest.mark.timeout(600)
GREEDY = SamplingParams(temperature=0.0)
MAX_TOKENS = 12
STOPPING = StopParams(MAX_TOKENS)
BACKENDS = ["torch", "openvino"]


class Oracle:
    """transformers' model of a folder."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model.eval()
        self.model.generation_config.eos_token_id = None
        self.embeddings = model.get_input_embeddings()
        self.vocab_size, self.hidden_size = self.model.config.vocab_size, self.model.config.hidden_size

    def rows(self, count: int, seed: int) -> torch.Tensor:
        """As large as the embeddings of tokens, but of none: [count, hidden]."""
        random = torch.Generator().manual_seed(seed)
        scale = self.embeddings(torch.arange(50)).float().std()
        return torch.randn(count, self.hidden_size, generator=random) * scale

    def embed(self, prompt: list[int], rows: torch.Tensor) -> torch.Tensor:
        """[1, T, hidden]."""
        ids = torch.tensor(prompt)
        virtual = ids >= self.vocab_size
        found = self.embeddings(ids.masked_fill(virtual, 0)).clone()
        found[virtual] = rows.float()[ids[virtual] - self.vocab_size]
        return found[None]

    @torch.inference_mode()
    def generate(self, prompt: list[int], rows: torch.Tensor, **options) -> list[int]:
        embeds = self.embed(prompt, rows)
        mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False} | options
        return self.model.generate(inputs_embeds=embeds, attention_mask=mask, **options)[0].tolist()


@pytest.fixture(scope="module")
def oracle(model_folder) -> Oracle:
    return Oracle(AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32))


def tables(*rows: torch.Tensor) -> PromptTables:
    return PromptTables(tuple(map(table_of, rows)))


def ask(harness: EngineHarness, prompt: list[int], *rows: torch.Tensor, **options) -> int:
    return harness.send(prompt, **({"sampling": GREEDY, "stopping": STOPPING} | options), tables=tables(*rows))


def tokens_of(harness: EngineHarness, number: int, sequence: int = 0) -> list[int]:
    harness.run()
    return harness.stream(number, sequence).tokens


def mixed(oracle: Oracle, prompts: list[list[int]], size: int) -> list[int]:
    """Virtual tokens at the start, within, and at the end."""
    text, first = prompts[12][:size], oracle.vocab_size
    return [first, first + 1, *text[: size // 2], first + 2, first + 3, first + 2, *text[size // 2 :], first + 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", BACKENDS)
def test_prompt_tuning_prompt_embeddings_and_a_mix(model_folder, prompts, oracle, backend, dtype):
    rows = oracle.rows(50, seed=1).to(dtype)
    virtual = range(oracle.vocab_size, oracle.vocab_size + 50)
    asked = [
        [*virtual[:8], *prompts[11][:40]],
        list(virtual),
        mixed(oracle, prompts, 60),
        [virtual[3]],
        [*virtual[:16], prompts[11][0]],
    ]
    harness = EngineHarness(model_folder, backend=backend)
    numbers = [ask(harness, prompt, rows) for prompt in asked]
    plain = harness.send(prompts[11][:40], GREEDY, STOPPING)
    harness.run()
    for prompt, number in zip(asked, numbers, strict=True):
        assert harness.stream(number).tokens == oracle.generate(prompt, rows), prompt
    alone = EngineHarness(model_folder, backend=backend)
    assert harness.stream(plain).tokens == tokens_of(alone, alone.send(prompts[11][:40], GREEDY, STOPPING))


def test_several_tables_are_joined(model_folder, prompts, oracle):
    rows = oracle.rows(9, seed=2)
    prompt = [oracle.vocab_size + i for i in (8, 3, 0, 4, 5)] + prompts[13][:20]
    harness = EngineHarness(model_folder)
    found = [ask(harness, prompt, *rows.split(sizes)) for sizes in ([9], [4, 5], [1, 3, 1, 4])]
    harness.run()
    assert [harness.stream(number).tokens for number in found] == [oracle.generate(prompt, rows)] * 3


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("overlap", [False, True])
def test_chunk_edges_everywhere(model_folder, prompts, oracle, backend, overlap):
    """At every place of the prompt, within virtual tokens and beside them."""
    rows, prompt = oracle.rows(5, seed=3), mixed(oracle, prompts, 14)
    expected = oracle.generate(prompt, rows)
    # A graph takes a while to compile: with OpenVINO at the edges of virtual tokens alone.
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
        assert tokens_of(harness, ask(harness, prompt, rows)) == expected, chunk


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_tables_share_blocks_and_others_do_not(model_folder, prompts, oracle, backend):
    """A text before the tables is shared in any case."""
    size = 16 if backend == "torch" else 32
    text, virtual = prompts[14][: 2 * size], [oracle.vocab_size + i for i in range(2 * size)]
    prompt = [*text, *virtual, *prompts[15][:5]]
    one, other = (oracle.rows(2 * size, seed) for seed in (4, 5))
    # Equal up to its last row.
    nearly = one.clone()
    nearly[-1] += 1
    harness = EngineHarness(model_folder, backend=backend)
    for rows, cached in ((one, 0), (other, 2), (nearly, 2), (one, 4), (other, 4)):
        number = ask(harness, prompt, rows)
        assert tokens_of(harness, number) == oracle.generate(prompt, rows)
        assert harness.cached_tokens(number) == cached * size


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"backend": "openvino"}], ids=str)
def test_pauses_and_a_pool_too_small_change_nothing(model_folder, prompts, oracle, options):
    harness = EngineHarness(model_folder, kv_cache_tokens=384, max_tokens_per_step=48, max_batch_size=8, **options)
    asked = [(mixed(oracle, prompts, 40 + 9 * i), oracle.rows(5, seed=i)) for i in range(6)]
    numbers = [ask(harness, prompt, rows, stopping=StopParams(60)) for prompt, rows in asked]
    harness.run()
    assert harness.pauses > 0
    for (prompt, rows), number in zip(asked, numbers, strict=True):
        assert harness.stream(number).tokens == oracle.generate(prompt, rows, max_new_tokens=60)


@pytest.mark.parametrize("backend", BACKENDS)
def test_resume_and_several_outputs(model_folder, prompts, oracle, backend):
    rows, prompt = oracle.rows(5, seed=6), mixed(oracle, prompts, 30)
    sampling = SamplingParams(seed=3, temperature=0.8, repetition_penalty=1.2, no_repeat_ngram_size=3)
    whole = EngineHarness(model_folder, backend=backend)
    number = ask(whole, prompt, rows, sampling=sampling, n=3)
    whole.run()
    streams = [whole.stream(number, i).tokens for i in range(3)]
    assert len(set(map(tuple, streams))) == 3
    for have in (1, 7):
        harness = EngineHarness(model_folder, backend=backend, max_tokens_per_step=8, max_batch_size=4)
        resume = {i: tokens[:have] for i, tokens in enumerate(streams[:2])}
        again = ask(harness, prompt, rows, sampling=sampling, n=3, resume=resume)
        harness.run()
        assert [harness.stream(again, i).tokens for i in range(3)] == streams


def test_beams(model_folder, prompts, oracle):
    rows, prompt = oracle.rows(5, seed=7), mixed(oracle, prompts, 30)
    harness = EngineHarness(model_folder, max_tokens_per_step=16, max_batch_size=8)
    beams = SamplingParams(temperature=1.0, logprobs=0, beam_search=BeamSearchParams(4))
    number = ask(harness, prompt, rows, sampling=beams, n=2)
    harness.run()
    expected = oracle.generate(prompt, rows, num_beams=4, num_return_sequences=1)
    assert harness.stream(number).tokens == expected


@pytest.mark.parametrize("overlap", [False, True])
def test_drafts(prompts, overlap):
    """A prompt that repeats itself around virtual tokens, which are never guessed."""
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32))
    rows = oracle.rows(5, seed=8)
    line, virtual = prompts[16][:9], [oracle.vocab_size + i for i in range(5)]
    prompt = [*line, *virtual, *line, *virtual[:2], *line, *line]
    harness = EngineHarness(tiny_model.path(), overlap=overlap)
    number = ask(harness, prompt, rows, stopping=StopParams(40), speculation=Speculation(4))
    assert tokens_of(harness, number) == oracle.generate(prompt, rows, max_new_tokens=40)


def test_a_draft_model_guesses_for_others_alone(prompts):
    """It has no embeddings for rows."""
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32))
    rows, prompt = oracle.rows(5, seed=13), mixed(oracle, prompts, 30)
    harness = EngineHarness(tiny_model.path(), draft_model=tiny_model.path())
    plain = harness.send(prompts[16][:30], GREEDY, StopParams(40), speculation=Speculation(4))
    number = ask(harness, prompt, rows, stopping=StopParams(40), speculation=Speculation(4))
    assert tokens_of(harness, number) == oracle.generate(prompt, rows, max_new_tokens=40)
    assert len(harness.stream(plain).tokens) == 40
    assert sum(step.draft_tokens for step in harness.steps) > 0


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.4}, {"no_repeat_ngram_size": 2}], ids=str)
def test_rules_do_not_count_virtual_tokens(model_folder, prompts, oracle, sampling):
    """As where the text alone, without them, were the prompt of the rules."""
    rows, text = oracle.rows(4, seed=9), prompts[17][:30]
    prompt = [*range(oracle.vocab_size, oracle.vocab_size + 4), *text]
    harness = EngineHarness(model_folder)
    number = ask(harness, prompt, rows, sampling=SamplingParams(temperature=0.0, **sampling))
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
        found, penalty = logits[seen], sampling["repetition_penalty"]
        logits[seen] = torch.where(found < 0, found * penalty, found / penalty)
    else:
        pairs = pairwise(known)
        logits[[after for before, after in pairs if before == known[-1]]] = -torch.inf
    return int(logits.argmax())


def test_context_logits_of_virtual_positions(model_folder, prompts, oracle):
    rows, prompt = oracle.rows(5, seed=10), mixed(oracle, prompts, 20)
    harness = EngineHarness(model_folder, max_tokens_per_step=7, max_batch_size=1)
    number = ask(harness, prompt, rows, tensors=TensorParams(context=("context_logits",)))
    harness.run()
    with torch.inference_mode():
        expected = oracle.model(inputs_embeds=oracle.embed(prompt, rows)).logits[0]
    found = harness.tensor(number, "context_logits", context=True)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_two_ranks(model_folder, prompts, oracle):
    rows, prompt = oracle.rows(5, seed=11), mixed(oracle, prompts, 30)
    with closing(EngineHarness(model_folder, tensor_parallel=2, max_tokens_per_step=16, max_batch_size=4)) as harness:
        assert tokens_of(harness, ask(harness, prompt, rows)) == oracle.generate(prompt, rows)


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "phi3"])
def test_models_that_transformers_runs(tmp_path, name):
    oracle = Oracle(write_checkpoint(tmp_path, ADAPTED[name]))
    rows = oracle.rows(5, seed=12)
    virtual = [oracle.vocab_size + i for i in range(5)]
    prompt = [*virtual[:2], *range(3, 30), *virtual[2:]]
    harness = EngineHarness(tmp_path, max_tokens_per_step=9, max_batch_size=2, kv_cache_tokens=1024)
    assert tokens_of(harness, ask(harness, prompt, rows)) == oracle.generate(prompt, rows)


def test_a_model_whose_embeddings_have_another_size_takes_none(tmp_path):
    """Its decoder projects them."""
    write_checkpoint(tmp_path, ADAPTED["opt"])
    harness = EngineHarness(tmp_path)
    assert harness.engine.intake._terms.hidden_size == 0
    number = ask(harness, [97, 3], torch.ones(1, 48))
    harness.run()
    assert "does not support prompt tables" in harness.stream(number).end.fault.message


def test_prompt_tuning_of_peft(prompts, tmp_path):
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
    assert tokens_of(harness, ask(harness, [*range(first, first + 7), *text], rows)) == expected


@pytest.mark.parametrize("broken", ["digest", "hidden", "ids", "prompt_logprobs", "extra_ids"])
def test_what_does_not_fit_is_refused(prompts, broken):
    harness = EngineHarness(tiny_model.path())
    oracle_size = harness.engine.intake._terms.hidden_size
    table = table_of(torch.ones(3, oracle_size))
    first, options = harness.engine.intake._terms.vocab_size, {}
    prompt = [first, first + 2, 5]
    if broken == "digest":
        table = Table(bytes(16), table.rows, table.hidden_size, table.dtype, table.data)
    elif broken == "hidden":
        table = table_of(torch.ones(3, oracle_size - 1))
    elif broken == "ids":
        prompt[1] = first + 3
    elif broken == "prompt_logprobs":
        options["prompt_logprobs"] = 0
    extra = (1,) if broken == "extra_ids" else ()
    number = harness.send(prompt, GREEDY, STOPPING, tables=PromptTables((table,), extra), **options)
    plain = harness.send(prompts[3], GREEDY, STOPPING)
    harness.run()
    assert harness.stream(number).end.fault.code == "INVALID_ARGUMENT"
    assert len(harness.stream(plain).tokens) == MAX_TOKENS
