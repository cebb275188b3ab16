import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.attention.cache import KVCache
from engine_worker.attention.cpu import CpuAttention
from engine_worker.layers.shard import Place
from engine_worker.models.llama import Llama
from engine_worker.models.qwen3 import Qwen3
from engine_worker.runner import warmup
from engine_worker.runner.batch import build_arrays
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.memory import MemoryTooSmallError
from engine_worker.runner.warmup import FILTERED, capture_graphs, graphs_refused, largest_step, warm_up
from engine_worker.sampling.choose import TORCH, Filtered, Unfiltered
from engine_worker.step import Slice
from tests.engine_worker.models.checkpoints import CONFIGS
from tests.fakes.graphs import FakeCapture
from tests.fakes.paged_attention import PagedTorch

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = RunnerConfig("cpu", tokens_per_block=4, max_batch_size=6, max_tokens_per_step=50)


def make(name: str, backend=None):
    architecture = Qwen3 if name.startswith("qwen3") else Llama
    shape = architecture.read_config(CONFIGS[name].to_dict())
    attention = CpuAttention(shape.heads, shape.windows) if backend is CpuAttention else PagedTorch(shape.heads)
    model = architecture(shape, attention, Place(torch.float32, CPU))
    for target in model.targets().values():
        target.normal_()
    model.freeze()

    def cache(num_blocks: int) -> KVCache:
        sizes = (CONFIG.tokens_per_block, shape.heads.num_kv_heads, shape.heads.head_dim)
        return KVCache(shape.num_layers, num_blocks, *sizes, torch.float32, CPU)

    return model, attention, cache


@given(
    batch=st.integers(1, 40),
    more=st.integers(0, 300),
    context=st.integers(1, 400),
    size=st.sampled_from([1, 4, 16]),
)
def test_the_largest_step(batch, more, context, size):
    config = RunnerConfig(tokens_per_block=size, max_batch_size=batch, max_tokens_per_step=batch + more)
    slices = largest_step(config, context, FILTERED)
    counts = [len(part.tokens) for part in slices]
    assert len(slices) == batch
    assert sum(counts) == min(batch + more, batch * context)
    assert min(counts) >= 1
    assert max(counts) == min(context, 1 + more)
    assert all(len(part.block_table) == -(-len(part.tokens) // size) for part in slices)
    assert all(len(part.draws) == 1 and part.start == 0 for part in slices)


@pytest.mark.parametrize("backend", [CpuAttention, PagedTorch])
@pytest.mark.parametrize("name", ["qwen3, tied", "qwen3, windowed", "llama"])
@torch.inference_mode()
def test_a_warm_up_samples_with_and_without_filters(monkeypatch, name, backend):
    model, attention, cache = make(name, backend)
    seen = []

    def sample(logits, plan, results, **options):
        assert options == {"widen": False, "kernels": TORCH}
        (group,) = plan.groups
        assert results.edits[0] is not None
        assert plan.logprob_rows is not None
        seen.append((logits.shape, type(group.choose), len(group.choose.keys)))
        return sampled(logits, plan, results, **options)

    sampled = warmup.sample
    monkeypatch.setattr(warmup, "sample", sample)
    warm_up(model, cache(1), attention, CONFIG, 30)
    assert seen == [((6, 97), Unfiltered, 6), ((6, 97), Filtered, 6)]
    warm_up(model, cache(1), attention, CONFIG, 30, kernels=None)
    assert len(seen) == 2


class OutOfMemoryModel:
    """A model that runs out of memory."""

    graphs = True
    takes_embeds = True
    has_axes = False

    def __init__(self, model) -> None:
        self.config = model.config

    def __call__(self, *_):
        raise torch.OutOfMemoryError("CUDA out of memory")


@torch.inference_mode()
def test_too_little_memory_is_reported_with_the_numbers(monkeypatch):
    monkeypatch.setattr(warmup, "free_memory", lambda device: 300 << 20)
    model, attention, cache = make("llama")
    with pytest.raises(
        MemoryTooSmallError, match=r"300 MiB .* max_tokens_per_step = 50 tokens and max_batch_size = 6 sequences"
    ):
        warm_up(OutOfMemoryModel(model), cache(1), attention, CONFIG, 30)
    with pytest.raises(MemoryTooSmallError, match=r"300 MiB are free somewhere: .* max_batch_size = 6 sequences"):
        warm_up(OutOfMemoryModel(model), cache(1), attention, CONFIG, 30, where="somewhere")
    with pytest.raises(MemoryTooSmallError, match=r"300 MiB .* graphs of 6 sequences; lower kv_memory_fraction"):
        capture_graphs(OutOfMemoryModel(model), cache(20), attention, CONFIG, 30, FakeCapture(), lambda *_: None)


@torch.inference_mode()
def test_graphs_fit_the_longest_possible_table():
    def width(name: str, num_blocks: int, context: int) -> int:
        model, attention, cache = make(name)
        graphs, *_ = capture_graphs(
            model, cache(num_blocks), attention, CONFIG, context, FakeCapture(), lambda *_: None
        )
        assert graphs.sizes == [1, 2, 4, 6]
        return graphs._buffers._blocks

    assert width("llama", 100, 30) == 8
    assert width("llama", 5, 30) == 5
    assert width("qwen3, windowed", 100, 300) == 5


@torch.inference_mode()
def test_short_contexts_have_separate_graphs(monkeypatch):
    """A graph repeats the launches of its longest context."""
    monkeypatch.setattr(warmup, "LONG", 8)
    model, attention, cache = make("llama")
    captured = capture_graphs(model, cache(100), attention, CONFIG, 30, FakeCapture(), lambda *_: None)

    def fitting(blocks: int, tokens: int = 1) -> list[int]:
        arrays = build_arrays([Slice([1] * tokens, 4 * blocks - tokens, range(blocks), ())], 4, None)
        return [i for i, graphs in enumerate(captured) if graphs.fit(arrays) is not None]

    assert [fitting(blocks) for blocks in (1, 2, 3, 8, 9)] == [[0, 1, 2], [0, 1, 2], [1, 2], [1, 2], []]
    assert fitting(2, tokens=3) == [2]


def test_reasons_against_graphs():
    model, attention, _ = make("llama")
    assert graphs_refused(CONFIG, model, attention, CUDA) is None
    assert graphs_refused(CONFIG, model, attention, CPU) == "the device is a CPU"
    without = RunnerConfig(cuda_graphs=False)
    assert graphs_refused(without, model, attention, CUDA) == "cuda_graphs = false"
    assert (
        graphs_refused(CONFIG, model, CpuAttention(model.config.heads), CUDA) == "attention = cpu waits for the device"
    )
    model.graphs = False
    assert graphs_refused(CONFIG, model, attention, CUDA) == "the model waits for the device"
