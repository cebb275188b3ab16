"""Steps that are replayed from CUDA graphs give the results of eager steps. The graphs are fake."""

import numpy as np
import pytest
import torch

from engine_worker.attention.cache import KVCache
from engine_worker.attention.choice import ChosenBackend
from engine_worker.layers.shard import Place
from engine_worker.models.registry import model_class
from engine_worker.runner import load
from engine_worker.runner.batch import build_arrays
from engine_worker.runner.buffers import (
    ContextBuffers,
    GenerationBuffers,
    table_width,
)
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.graphs import Graphs
from engine_worker.runner.load import load_runner
from engine_worker.runner.runner import ModelRunner
from engine_worker.runner.torch_forward import TorchForward
from engine_worker.runner.weights import fill_weights
from engine_worker.step import Draw, Kept, Slice, Step
from sluice.wire.params import SamplingParams
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint
from tests.engine_worker.runner.generate import generate
from tests.fakes.graphs import FakeCapture
from tests.fakes.paged_attention import PagedTorch

CPU = torch.device("cpu")
TOKENS_PER_BLOCK, NUM_BLOCKS, CONTEXT = 4, 64, 48
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module", params=["qwen3, tied", "llama, biased, linear rope", "mistral", "qwen3, windowed"])
def checkpoint(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_checkpoint(folder, CONFIGS[request.param])
    return open_written(folder)


def make(
    checkpoint,
    capture: FakeCapture | None,
    rows: int = 5,
    context: int = CONTEXT,
    overlap: bool = False,
    tokens: int = 0,
):
    """A runner with graphs for up to `rows` sequences, and for steps with context of up to `tokens`; or without."""
    architecture = model_class(checkpoint.config)
    shape = architecture.read_config(checkpoint.config)
    backend = PagedTorch(shape.heads)
    with torch.inference_mode():
        model = architecture(shape, backend, Place(torch.float32, CPU))
        fill_weights(model, checkpoint, RunnerConfig("cpu"), lambda *_: None)
        sizes = (TOKENS_PER_BLOCK, shape.heads.num_kv_heads, shape.heads.head_dim)
        cache = KVCache(shape.num_layers, NUM_BLOCKS, *sizes, torch.float32, CPU)
        graphs = []
        if capture is not None:
            blocks = table_width(context, None, TOKENS_PER_BLOCK)
            kinds = [GenerationBuffers(rows, blocks, TOKENS_PER_BLOCK, CPU)]
            if tokens:
                kinds.append(ContextBuffers(tokens, rows, blocks, TOKENS_PER_BLOCK, CPU))
            graphs = [
                Graphs(
                    lambda ids, positions, inputs: model(ids, positions, cache, inputs),
                    lambda inputs: backend.prepare(inputs, cache),
                    buffers,
                    capture,
                )
                for buffers in kinds
            ]
        return ModelRunner(TorchForward(model, cache, backend, CPU, graphs, output_layers=(0, 1)), overlap)


PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13], [14], [15, 16, 17], [18, 19, 20, 21, 22], [23, 24]]


@pytest.mark.quick(10)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"seed": 3}], ids=str)
def test_replayed_steps_equal_eager_ones(checkpoint, count, sampling):
    capture = FakeCapture()
    eager, replayed = make(checkpoint, None), make(checkpoint, capture)
    expected = generate(eager, PROMPTS[:count], 30, **sampling)
    assert generate(replayed, PROMPTS[:count], 30, **sampling) == expected
    assert sum(graph.replays for graph in capture.graphs) == 29
    assert {1: 3, 2: 2, 3: 1, 4: 1, 5: 0}[count] == max(i for i, graph in enumerate(capture.graphs) if graph.replays)


@pytest.mark.quick(2)
def test_a_loaded_runner_has_graphs(checkpoint, monkeypatch):
    """Loaded as on a GPU, with a fake capture."""
    config = RunnerConfig("cpu", tokens_per_block=TOKENS_PER_BLOCK, kv_cache_tokens=256, max_batch_size=5)
    expected = generate(load_runner(checkpoint, config, lambda *_: None), PROMPTS[:3], 12, temperature=0.0)
    capture, progress = FakeCapture(), []
    monkeypatch.setattr(load, "graphs_refused", lambda *_: None)
    monkeypatch.setattr(load, "CudaCapture", lambda device: capture)
    monkeypatch.setattr(
        load, "choose", lambda _, site: ChosenBackend(PagedTorch(site.heads), "it is fake", site.tokens_per_block)
    )
    runner = load_runner(checkpoint, config, lambda *_: None, capturing=lambda *at: progress.append(at))
    assert runner.choices["cuda_graphs"] == "4 up to 5 and 7 up to 512 with context"
    assert progress == [(done, 11) for done in range(12)]
    assert generate(runner, PROMPTS[:3], 12, temperature=0.0) == expected
    assert sum(graph.replays for graph in capture.graphs) == 12


@pytest.mark.quick(10)
@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 20])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_replayed_steps_with_context_equal_eager_ones(checkpoint, count, chunk):
    """Chunks of prompts in steps with generating sequences, each padded to a larger graph."""
    capture = FakeCapture()
    eager, replayed = make(checkpoint, None), make(checkpoint, capture, tokens=64)
    expected = generate(eager, PROMPTS[:count], 12, chunk=chunk, temperature=0.0)
    assert generate(replayed, PROMPTS[:count], 12, chunk=chunk, temperature=0.0) == expected
    longest = max(map(len, PROMPTS[:count]))
    steps = sum(graph.replays for graph in capture.graphs)
    assert steps == -(-longest // chunk) + 11
    assert (sum(graph.replays for graph in capture.graphs[4:]) > 0) == (chunk > 1)


def test_all_in_one_step(checkpoint):
    """Generation rows, a chunk, drafts to verify, rows for a client, and a whole prompt; what they read lies behind
    each other in the same tables afterwards."""

    def steps() -> list[Step]:
        draws = (Draw(GREEDY, 0, 3),)
        first = Step(tuple(Slice(PROMPTS[i], 0, range(12 * i, 12 * i + 12), ()) for i in range(3)))
        mixed = (
            Slice([9], 7, range(12), draws),
            Slice([8, 7, 6], 2, range(12, 24), tuple(Draw(GREEDY, 0, i) for i in range(3)), drafts=2),
            Slice([4, 5], 1, range(24, 36), (), kept=(Kept(1, 2, ("logits",), True),)),
            Slice(PROMPTS[4], 0, range(36, 48), draws),
        )
        return [first, Step(mixed), Step((Slice([3], 8, range(12), draws), Slice([3], 5, range(12, 24), draws)))]

    capture, results = FakeCapture(), []
    for runner in (make(checkpoint, None), make(checkpoint, capture, tokens=40)):
        launched = [runner.launch(step) for step in steps()]
        drawn = [[each.token for each in step.collect()] for step in launched]
        results.append(
            (
                drawn,
                [np.frombuffer(row.data, np.float32) for step in launched for rows in step.kept_rows() for row in rows],
            )
        )
    assert results[0][0] == results[1][0]
    for expected, rows in zip(results[0][1], results[1][1], strict=True):
        np.testing.assert_allclose(rows, expected, atol=1e-4)
    assert sum(graph.replays for graph in capture.graphs) == 3


def test_a_cpu_has_no_graphs(checkpoint):
    runner = load_runner(checkpoint, RunnerConfig("cpu", kv_cache_tokens=256), lambda *_: None)
    assert runner.choices["cuda_graphs"] == "none: the device is a CPU"


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_that_are_launched_before_any_is_collected(checkpoint, overlap):
    """The number of sequences changes from step to step; tokens come from the previous step."""

    def slices(step: int) -> Step:
        live = [i for i in range(5) if step < 4 + 3 * i]
        before = [i for i in range(5) if step - 1 < 4 + 3 * i]
        parts = []
        for i in live:
            draws = (Draw(GREEDY, 0, step),)
            blocks = list(range(12 * i, 12 * i + 12))
            if step == 0:
                parts.append(Slice(PROMPTS[i], 0, blocks, draws))
            else:
                parts.append(Slice([0], len(PROMPTS[i]) + step - 1, blocks, draws, before.index(i)))
        return Step(tuple(parts))

    def run(runner: ModelRunner) -> list[list[int]]:
        launched = [runner.launch(slices(step)) for step in range(16)]
        return [[drawn.token for drawn in step.collect()] for step in launched]

    capture = FakeCapture()
    assert run(make(checkpoint, capture, overlap=overlap)) == run(make(checkpoint, None))
    assert sum(graph.replays for graph in capture.graphs) == 15


def test_a_step_is_eager_if_no_graph_fits(checkpoint):
    capture = FakeCapture()
    runner = make(checkpoint, capture, rows=2, context=16)
    expected = generate(make(checkpoint, None), PROMPTS[:3], 8, temperature=0.0)
    assert generate(runner, PROMPTS[:3], 8, temperature=0.0) == expected
    assert not any(graph.replays for graph in capture.graphs)
    expected = generate(make(checkpoint, None), PROMPTS[:1], 20, temperature=0.0)
    assert generate(runner, PROMPTS[:1], 20, temperature=0.0) == expected
    steps = [Slice([1], start, range(9), ()) for start in range(len(PROMPTS[0]), len(PROMPTS[0]) + 19)]
    widths = [build_arrays([step], TOKENS_PER_BLOCK, runner.window).block_tables.shape[1] for step in steps]
    assert max(widths) > 4
    assert sum(graph.replays for graph in capture.graphs) == sum(width <= 4 for width in widths)


def test_steps_with_output_layers_are_eager(checkpoint):
    """Even if there is a graph for the batch, which the next step uses again."""

    def step(start: int, *names: str) -> Step:
        kept = (Kept(start, 1, names, True),) if names else ()
        draws = (Draw(GREEDY, 0, start),)
        return Step((Slice([9 + start], start, range(12), draws, kept=kept), Slice([5], start, range(20, 32), draws)))

    steps = [step(0), step(1, "layers.1", "layers.0"), step(2), step(3, "logits", "hidden_states"), step(4, "layers.0")]
    capture = FakeCapture()
    tokens, rows = [], []
    for runner in (make(checkpoint, None), make(checkpoint, capture)):
        launched = [runner.launch(each) for each in steps]
        tokens.append([[drawn.token for drawn in each.collect()] for each in launched])
        rows.append([part for each in launched for kept in each.kept_rows() for part in kept])
    assert tokens[0] == tokens[1]
    assert [each.name for each in rows[1]] == ["layers.1", "layers.0", "logits", "hidden_states", "layers.0"]
    for expected, actual in zip(*rows, strict=True):
        np.testing.assert_allclose(*(np.frombuffer(each.data, np.float32) for each in (actual, expected)), atol=1e-5)
    assert sum(graph.replays for graph in capture.graphs) == 3


def test_padding_changes_no_slots(checkpoint):
    """A replay with padding changes only the slots of its rows, also after a larger replay."""
    capture = FakeCapture()
    runner = make(checkpoint, capture, rows=8)
    blocks = runner._forward.cache._blocks
    assert not blocks.any()
    with torch.inference_mode():
        blocks.normal_()
        runner.run(Step(tuple(Slice([7], 4 * i + 3, [*range(i, -1, -1)], ()) for i in range(8))))
        before = blocks.clone()
        runner.run(Step(tuple(Slice([7], 9, [30 + i, 40 + i, 50 + i], ()) for i in range(3))))
        changed = (blocks != before).any(-1).any(-1)
    rows = changed.nonzero().tolist()
    assert [graph.replays for graph in capture.graphs] == [1, 1, 0, 0]
    assert {(block, slot) for *_, block, slot in rows} == {(50 + i, 1) for i in range(3)}
