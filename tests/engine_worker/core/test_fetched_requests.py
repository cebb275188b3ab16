"""Requests of every kind on an engine beside one that has computed their prompt: what they may copy, and what not."""

from pathlib import Path

import pytest

from engine_worker.pool_files.folder import PoolFolder
from sluice.wire.params import BeamSearchParams, Speculation
from sluice.wire.tables import PromptTables, Table
from sluice.wire.tensors import TensorParams
from tests.engine_worker.core.test_beams import check
from tests.engine_worker.core.test_preparation import Making
from tests.fakes.adapters import ScriptedAdapters, adapter
from tests.fakes.engine import EngineBench
from tests.fakes.scripted_tokens import HIDDEN_SIZE, VOCAB

PROMPT = list(range(40))
SIZE = 4
"""Tokens per block."""
ALL = len(PROMPT) // SIZE - 1
"""Blocks of the prompt that can be copied: its last token is computed again."""
A, B = adapter("a"), adapter("b")


@pytest.fixture
def folder(shared_memory: Path) -> Path:
    """With an engine that has computed PROMPT, and ends."""
    start(shared_memory, "a", PROMPT)
    return shared_memory


def start(folder: Path, name: str, prompt: list[int], adapters: bool = False, **fields) -> EngineBench:
    """An engine that has computed a prompt."""
    bench = engine(folder, name, adapters=adapters)
    bench.submit(prompt, max_tokens=1, **fields)
    bench.run()
    return bench


def engine(folder: Path, name: str = "b", adapters: bool = False, **options) -> EngineBench:
    library = ScriptedAdapters(4, {A.version: 1, B.version: 1}) if adapters else None
    view = PoolFolder(folder, name, lambda _: None)
    return EngineBench(tokens_per_block=SIZE, folder=view, adapters=library, **options)


def fetched(bench: EngineBench, prompt: list[int] = PROMPT, **fields) -> int:
    """Blocks that a request copies; its output must be right."""
    request = bench.submit(prompt, max_tokens=4, **fields)
    bench.run()
    for sequence in range(fields.get("n", 1)):
        assert bench.output(request, sequence) == bench.expected(request, sequence)
    return bench.cache.fetches.fetched


def test_a_plain_request(folder: Path) -> None:
    assert fetched(engine(folder)) == ALL


def test_other_weights(folder: Path) -> None:
    assert fetched(engine(folder, fingerprint="other")) == 0


def test_another_block_size(folder: Path) -> None:
    bench = EngineBench(tokens_per_block=5, folder=PoolFolder(folder, "b", lambda _: None))
    assert fetched(bench) == 0


def test_several_outputs_share_the_copies(folder: Path) -> None:
    bench = engine(folder)
    assert fetched(bench, n=3) == ALL
    assert bench.runner.computed == SIZE + 3 * 3


def test_beams_share_the_copies(folder: Path) -> None:
    bench = engine(folder)
    request = bench.submit(PROMPT, max_tokens=8, n=2, beams=BeamSearchParams(3))
    bench.run()
    check(bench, request)
    assert bench.cache.fetches.fetched == ALL
    assert bench.runner.computed == SIZE + 3 * 7


def test_twenty_streams_with_one_prefix_move_at_once(folder: Path) -> None:
    bench = engine(folder, max_requests=20)
    requests = [bench.submit(PROMPT, max_tokens=4, seed=seed) for seed in range(20)]
    bench.run()
    assert all(bench.output(request) == bench.expected(request) for request in requests)
    assert bench.cache.fetches.fetched == ALL


def test_an_adapters_blocks_serve_only_it(shared_memory: Path) -> None:
    start(shared_memory, "a", PROMPT, adapters=True, adapter=A)
    bench = engine(shared_memory, adapters=True)
    assert fetched(bench) == 0
    assert fetched(bench, adapter=B) == 0
    assert fetched(bench, adapter=A) == ALL


def test_other_rows_of_a_table_are_other_content(shared_memory: Path) -> None:
    """Images are rows, too."""
    prompt = [*range(VOCAB, VOCAB + 5), *PROMPT]
    same, other = (PromptTables((Table.of(5, HIDDEN_SIZE, "float16", text * 5),)) for text in (b"same", b"more"))
    start(shared_memory, "a", prompt, tables=same)
    bench = engine(shared_memory)
    for tables, count in ((other, 0), (same, 11)):
        bench.submit(prompt, max_tokens=4, tables=tables)
        bench.run()
        assert bench.cache.fetches.fetched == count


def test_log_probabilities_of_a_prompt_need_all_of_it(folder: Path) -> None:
    bench = engine(folder)
    assert fetched(bench, prompt_logprobs=1) == 0
    assert len(bench.receiver.prompt_logprobs[1, 0]) == len(PROMPT) - 1


def test_tensors_of_a_prompt_need_all_of_it(folder: Path) -> None:
    bench = engine(folder)
    assert fetched(bench, tensors=TensorParams(("context_logits",))) == 0
    assert fetched(bench, [*PROMPT, 1], tensors=TensorParams(output=("generation_logits",))) == 0
    other = engine(folder, "c")
    assert fetched(other, tensors=TensorParams(output=("generation_logits",))) == ALL


@pytest.mark.parametrize("guide_first", [True, False])
def test_a_request_that_waits_for_its_guide_and_its_blocks(folder: Path, guide_first: bool) -> None:
    bench = engine(folder)
    making = bench.runner.preparations[1] = Making()
    request = bench.submit(PROMPT, max_tokens=4)
    if guide_first:
        making.end()
    for _ in range(20):
        bench.step()
    making.end()
    bench.run()
    assert bench.output(request) == bench.expected(request)
    assert bench.runner.computed == SIZE + 3


def test_the_draft_model_computes_copied_blocks_itself(folder: Path) -> None:
    bench = engine(folder, draft_context=1000, max_draft_batch=8)
    assert fetched(bench, speculation=Speculation(3)) == ALL
    assert bench.runner.computed < len(PROMPT)
    assert bench.runner.drafter.computed >= len(PROMPT)


def test_adopted_blocks_count_as_not_drafted(shared_memory: Path) -> None:
    start(shared_memory, "a", PROMPT).runner.pool_file.close()
    bench = engine(shared_memory, "a", draft_context=1000, max_draft_batch=8)
    assert bench.cache.tiers.adopted == len(PROMPT) // SIZE
    assert fetched(bench, speculation=Speculation(3)) == 0
    assert bench.runner.drafter.computed >= len(PROMPT)


def test_copies_do_not_evict_the_blocks_before_them(folder: Path) -> None:
    bench = engine(folder, num_blocks=14)
    for prompt in (PROMPT[:20], [token + 50 for token in range(28)]):
        bench.submit(prompt, max_tokens=1)
        bench.run()
    before = bench.runner.computed
    assert fetched(bench) == 4 + ALL - 5
    assert bench.runner.computed - before == SIZE + 3
