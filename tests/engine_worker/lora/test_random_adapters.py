"""Twenty random adapters compute what peft does: alone, several and none in one batch, and in any order of loads,
uses, unloads and reloads under the same name, with both caches too small."""

import random
from collections.abc import Iterator

import pytest
import torch

from engine_worker.lora.checkpoint import read_adapter
from sluice.wire.adapters import Adapter
from tests.engine_worker.lora.engines import OPENVINO, held, load_first, lora_engine, lora_runner, submit
from tests.engine_worker.lora.oracle import ATTENTION, MLP, adapter_of, files_of, write_adapter
from tests.engine_worker.lora.test_peft import check, prompt

COUNT, LARGEST = 20, 64
PAGE_RANKS = 8
TOKENS = 5
NAMES = "abc"


def random_options(seed: int) -> dict:
    """Options with a rank from 1 to LARGEST."""
    rng = random.Random(seed)
    targets = rng.sample(ATTENTION + MLP, rng.randint(1, 7))
    options = {"targets": targets, "rank": 1 + seed * (LARGEST - 1) // (COUNT - 1), "lora_alpha": rng.randint(1, 40)}
    if rng.random() < 0.3:
        options["use_rslora"] = True
    if rng.random() < 0.3:
        options["layers_to_transform"] = [rng.randrange(2)]
    if rng.random() < 0.3:
        options["rank_pattern"] = {targets[0]: rng.randint(1, LARGEST)}
    return options


@pytest.fixture(scope="module")
def folders(model):
    return [write_adapter(model.parent / f"random{i}", model, i, **random_options(i)) for i in range(COUNT)]


@pytest.fixture(scope="module")
def weights(model, folders):
    targets = lora_runner(model).adapters._targets
    return [read_adapter(files_of(folder), targets, LARGEST, torch.float32) for folder in folders]


def test_each_alone(model, oracle, folders):
    bench = lora_engine(model)
    for i, folder in enumerate(folders):
        tokens = prompt(i)
        check(bench, oracle, {submit(bench, tokens, adapter_of(folder), TOKENS, logprobs=0): (tokens, folder)}, TOKENS)
        # The adapter matters.
        assert not torch.allclose(oracle.logits(folder, tokens), oracle.logits(None, tokens), atol=1e-3)


@pytest.mark.quick(2)
@pytest.mark.parametrize("seed", range(5))
def test_sixteen_requests_with_four_adapters_and_none(model, oracle, folders, seed):
    bench, submitted = lora_engine(model), {}
    chosen = [*folders[seed::5], None]
    load_first(bench, folders[seed::5])
    for i in range(16):
        tokens, folder = prompt(i, 3 + 7 * (i % 4)), chosen[i % len(chosen)]
        submitted[submit(bench, tokens, folder and adapter_of(folder), TOKENS, logprobs=0)] = tokens, folder
    launched, launch = [], bench.runner.launch
    bench.runner.launch = lambda step: launched.append(step) or launch(step)
    check(bench, oracle, submitted, TOKENS)
    generating = [[part.adapter_slot for part in step.slices if len(part.tokens) == 1] for step in launched]
    assert max(len(set(numbers)) for numbers in generating) == 5


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("seed", "backend"), [(0, "torch"), (1, "torch"), pytest.param(2, *OPENVINO.values, marks=OPENVINO.marks)]
)
def test_any_order_of_loads_uses_unloads_and_reloads(model, oracle, folders, weights, seed, backend):
    """The weights of a name change often; a request gets the version that its name had when it was submitted."""
    rng = random.Random(seed)
    bench = lora_engine(
        model,
        backend=backend,
        # The largest adapter fits into both caches, but rarely together with another one.
        lora_num_device_module_layer=PAGE_RANKS * max(adapter.num_pages(PAGE_RANKS) for adapter in weights),
        lora_host_cache_size=max(adapter.nbytes for adapter in weights) * 3 // 2,
        batching={"max_tokens_per_step": 24, "max_batch_size": 6},
    )
    library, submitted = bench.runner.adapters, {}
    names = dict(zip(NAMES, rng.sample(folders, len(NAMES)), strict=True))
    for action in script(rng, 90):
        name = rng.choice(NAMES)
        if action == "reload":
            names[name] = rng.choice(folders)
        elif action == "load":
            library.load(str(names[name]))
        elif action == "unload":
            library.remove(files_of(names[name]).version)
        elif action == "use":
            tokens, folder = prompt(rng.randrange(3), rng.choice((9, 30))), rng.choice((names[name], None))
            submitted[submit(bench, tokens, folder and named(name, folder), TOKENS, logprobs=0)] = tokens, folder
        else:
            for _ in range(rng.randint(1, 4)):
                bench.step()
    check(bench, oracle, submitted, TOKENS)
    assert bench.engine.cache.adapters.evictions > len(NAMES)
    assert all(library.remove(version) for version in held(library))


def script(rng: random.Random, size: int) -> Iterator[str]:
    return (rng.choice(("reload", "load", "unload", "use", "use", "step")) for _ in range(size))


def named(name: str, folder) -> Adapter:
    return Adapter(name, files_of(folder).version, str(folder))
