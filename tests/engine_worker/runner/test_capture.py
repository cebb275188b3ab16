"""Failed captures: CUDA's state is restored, all ranks serve without graphs, and serving continues."""

from contextlib import contextmanager

import pytest
import torch

from engine_worker.attention.choice import ChosenBackend
from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.shard import Shard
from engine_worker.runner import load
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.graphs import WARM_UPS, CaptureError, CudaCapture
from engine_worker.runner.load import load_runner
from engine_worker.runner.warmup import capture_graphs
from tests.engine_worker.models.checkpoints import CONFIGS, open_written, write_checkpoint
from tests.engine_worker.runner.generate import generate
from tests.engine_worker.runner.test_warmup import CONFIG, make
from tests.fakes.graphs import FakeCapture
from tests.fakes.paged_attention import PagedTorch

CUDA = torch.device("cuda", 0)
PROMPTS = [[5, 6, 7, 8, 9], [12, 13], [14]]


class Stream:
    """A CUDA stream."""

    def wait_stream(self, other) -> None:
        pass


class FakeCuda:
    """As in torch, ending an invalidated capture raises, and leaves the capture's stream and memory pool in use."""

    def __init__(self, monkeypatch) -> None:
        self.before = self.current = Stream()
        self.pools: set = set()
        for name in ("stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda: self.current)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", self.end_allocation, raising=False)

    def end_allocation(self, device, pool) -> None:
        if (device, pool) not in self.pools:
            raise RuntimeError("not currently recording to this pool")
        self.pools.discard((device, pool))

    @contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph, pool, stream, capture_error_mode):
        self.spoilt = False
        before, self.current = self.current, stream
        self.pools.add((0, pool))
        try:
            yield
        finally:
            if self.spoilt:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            self.pools.discard((0, pool))
            self.current = before


def failing(cuda: FakeCuda, error: Exception, run: int, *, spoils: bool = True):
    """Work whose `run`-th run fails."""
    runs = []

    def work() -> None:
        runs.append(cuda.current)
        if len(runs) == run:
            cuda.spoilt = spoils
            raise error

    return work


@pytest.mark.parametrize("spoils", [True, False])
def test_a_failed_capture_raises_its_cause_and_restores_the_state(monkeypatch, spoils):
    cuda = FakeCuda(monkeypatch)
    error = RuntimeError("CUDA error: operation not permitted when stream is capturing\nand much more")
    with pytest.raises(CaptureError, match=r"^CUDA error: operation not permitted when stream is capturing$"):
        CudaCapture(CUDA)(failing(cuda, error, WARM_UPS + 1, spoils=spoils))
    assert cuda.current is cuda.before
    assert not cuda.pools


def test_an_error_that_only_the_end_of_a_capture_raises(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(CaptureError, match="a previous error during capture"):
        CudaCapture(CUDA)(lambda: setattr(cuda, "spoilt", True))
    assert cuda.current is cuda.before
    assert not cuda.pools


def test_failing_work_and_lack_of_memory_raise_other_errors(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    with pytest.raises(RuntimeError, match="wrong shapes") as caught:
        CudaCapture(CUDA)(failing(cuda, RuntimeError("wrong shapes"), WARM_UPS))
    assert not isinstance(caught.value, CaptureError)
    with pytest.raises(torch.OutOfMemoryError):
        CudaCapture(CUDA)(failing(cuda, torch.OutOfMemoryError("CUDA out of memory"), WARM_UPS + 1))
    assert cuda.current is cuda.before


def test_a_capture_that_succeeds(monkeypatch):
    cuda = FakeCuda(monkeypatch)
    streams = []
    capture = CudaCapture(CUDA)
    assert capture(lambda: streams.append(cuda.current)) is not None
    assert streams == [capture._stream] * (WARM_UPS + 1)
    assert cuda.current is cuda.before


class Copying(PagedTorch):
    """Copies a number to the device in each step, as modules that were not written for graphs do."""

    def attend(self, query, *arguments):
        return super().attend(query * torch.tensor(1.0), *arguments)


@pytest.fixture
def loaded(tmp_path, monkeypatch):
    """Loads as on a GPU, with a fake capture."""
    write_checkpoint(tmp_path, CONFIGS["qwen3, tied"])
    config = RunnerConfig("cpu", tokens_per_block=4, kv_cache_tokens=256, max_batch_size=5, max_tokens_per_step=64)
    warm_up, warm_ups = load.warm_up, []

    def noted(*given, where, **options):
        warm_ups.append(where)
        warm_up(*given, where=where, **options)

    monkeypatch.setattr(load, "graphs_refused", lambda *_: None)
    monkeypatch.setattr(load, "CudaCapture", lambda device: FakeCapture())
    monkeypatch.setattr(load, "warm_up", noted)

    def loaded(backend):
        monkeypatch.setattr(
            load, "choose", lambda _, site: ChosenBackend(backend(site.heads), "fake", site.tokens_per_block)
        )
        warnings = []
        runner = load_runner(
            open_written(tmp_path), config, lambda *_: None, warn=lambda *warning: warnings.append(warning)
        )
        return runner, warnings, warm_ups

    return loaded


def test_a_model_that_cannot_be_captured_is_served_without_graphs(loaded):
    expected = generate(loaded(PagedTorch)[0], PROMPTS, 8, temperature=0.0)
    runner, warnings, warm_ups = loaded(Copying)
    why = "none: the capture failed: operation not permitted when stream is capturing: aten::lift_fresh"
    assert runner.choices["cuda_graphs"] == why
    assert warnings == [("cuda_graphs_failed", why)]
    assert generate(runner, PROMPTS, 8, temperature=0.0) == expected
    assert len(warm_ups) == 2


def test_warms_up_again_after_the_captures(loaded):
    runner, warnings, warm_ups = loaded(PagedTorch)
    assert runner.choices["cuda_graphs"] == "4 up to 5 and 4 up to 64 with context"
    assert warnings == []
    assert warm_ups == ["in addition to the KV cache (see kv_memory_fraction) and CUDA graphs"]


class Pair(Shard):
    """One of two ranks; the other one fails to capture the graph with this number."""

    size = 2

    def __init__(self, fails_at: int) -> None:
        self.votes: list[int] = []
        self._fails_at = fails_at

    def all_min(self, number: int) -> int:
        self.votes.append(number)
        return min(number, int(len(self.votes) != self._fails_at))


@torch.inference_mode()
def test_all_ranks_fail_at_the_same_graph():
    def captured(capture, fails_at: int) -> list[int]:
        model, attention, cache = make("llama")
        pair = Pair(fails_at)
        with pytest.raises(CaptureError, match="another rank failed" if fails_at else "not here"):
            capture_graphs(model, cache(20), attention, CONFIG, 30, capture, lambda *_: None, pair)
        return pair.votes

    class Third(FakeCapture):
        def __call__(self, work):
            if len(self.graphs) == 2:
                raise CaptureError("not here")
            return super().__call__(work)

    assert captured(FakeCapture(), 3) == [1, 1, 1]
    assert captured(Third(), 0) == [1, 1, 0]


def test_attention_fell_back_on_a_gpu_is_reported():
    model, attention, _ = make("llama")
    warnings = []
    reference = ChosenBackend(
        ReferenceAttention(model.config.heads), "nothing faster runs here. Triton: no compiler", 16
    )
    for chosen, device in (
        (reference, CUDA),
        (reference, torch.device("cpu")),
        (ChosenBackend(attention, "fine", 16), CUDA),
    ):
        load._warn_if_slow(chosen, device, lambda *warning: warnings.append(warning))
    assert warnings == [("attention_fell_back", "nothing faster runs here. Triton: no compiler")]
