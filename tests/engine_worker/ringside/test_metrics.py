"""Metrics of an engine's LoRA adapters and images."""

from types import SimpleNamespace as Stub

import pytest
from msgspec.structs import replace

from engine_worker.protocol import ImageUsage
from engine_worker.ringside import metrics
from tests.engine_worker.lora.engines import finish, lora_engine, lora_runner, submit
from tests.engine_worker.lora.oracle import adapter_of, write_adapter
from tests.engine_worker.models.checkpoints import CONFIGS, write_checkpoint
from tests.fakes.engine import EngineBench

P = "sluice_engine_lora_"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("metrics") / "model"
    write_checkpoint(folder, CONFIGS["qwen3, tied"])
    return folder


@pytest.fixture(scope="module")
def folders(model):
    """Adapters of two pages, one per layer."""
    return [write_adapter(model.parent / f"tuned{seed}", model, seed, targets=("v_proj",)) for seed in range(3)]


@pytest.fixture(scope="module")
def size(model, folders) -> int:
    """Bytes of one adapter in host memory."""
    library = lora_runner(model).adapters
    loading = library.load(str(folders[0]))
    while not loading.poll():
        pass
    return library.usage.used_bytes


def counts(bench) -> dict[str, dict[str, float]]:
    """Values by metric and label."""
    inbox = Stub(malformed=0, refused=0, gaps=0)
    families = metrics.read(bench.engine, None, inbox, bench.mailbox, bench.outbox, None)
    return {
        family.name.removeprefix(P): {next(iter(sample.labels.values())): sample.value for sample in family.samples}
        for family in families
        if family.name.startswith(P)
    }


def test_pages_and_loads(model, folders, size):
    bench = lora_engine(model, lora_num_device_module_layer=8 * 5)
    assert counts(bench)["loads"] == {"LOADED": 0}
    assert counts(bench)["pages"] == {"used": 0, "cached": 0, "free": 5}
    submit(bench, [1, 2, 3], adapter_of(folders[0]))
    while not counts(bench)["pages"]["used"]:
        bench.step()
    assert counts(bench)["pages"] == {"used": 2, "cached": 0, "free": 3}
    for folder in folders[1:]:
        submit(bench, [1, 2, 3], adapter_of(folder))
        finish(bench)
    submit(bench, [1, 2, 3], replace(adapter_of(folders[0]), version="0" * 32))
    finish(bench)
    assert counts(bench) == {
        "loads": {"LOADED": 3, "ADAPTER_MISSING": 1},
        "adapters": {"host": 3, "device": 2},
        "evictions": {"host": 0, "device": 1},
        "pages": {"used": 0, "cached": 4, "free": 1},
        "host_bytes": {"used": 3 * size, "free": (1 << 30) - 3 * size},
    }


def test_host_memory_too_small_for_two(model, folders, size):
    bench = lora_engine(model, lora_host_cache_size=size * 3 // 2)
    for folder in folders[:2]:
        submit(bench, [1, 2, 3], adapter_of(folder))
        finish(bench)
    assert counts(bench)["adapters"] == {"host": 1, "device": 2}
    assert counts(bench)["evictions"] == {"host": 1, "device": 0}


def test_metrics_of_images():
    usage = ImageUsage(2, 48, 64, 3, {"hit": 5, "miss": 4, "recomputed": 1})
    values = {family.name: [sample.value for sample in family.samples] for family in metrics.image_rows(usage)}
    assert values == {
        "sluice_engine_image_lookups": [5, 4, 1],
        "sluice_engine_images": [2],
        "sluice_engine_image_evictions": [3],
        "sluice_engine_image_bytes": [48, 16],
    }


def test_without_adapters_their_metrics_have_no_values():
    assert not any(counts(EngineBench()).values())
