"""Matrices as a GGUF file stores them: bits that do not depend on the batch, adapters, and blocks of a dead engine."""

from pathlib import Path

import pytest
import torch

from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.runner.extensions import Extensions
from engine_worker.runner.runner import ModelRunner
from engine_worker.step import Draw, Slice
from sluice.wire.params import SamplingParams
from tests.engine_worker.formats.gguf_files import write_pair
from tests.engine_worker.openvino.loaded import load, load_adapter
from tests.engine_worker.takeover import check_takeover

MIXED = {
    "q_proj": "Q4_K",
    "k_proj": "Q6_K",
    "o_proj": "Q5_0",
    "gate_proj": "Q4_1",
    "up_proj": "Q4_1",
    "down_proj": "Q5_K",
    "lm_head": "Q8_0",
    "embed_tokens": "Q8_0",
}
"""A value projection that is not quantized, and every way to compute with the others."""
DRAW = Draw(SamplingParams(temperature=0.0), 0, 0)
LENGTHS = [1 + 37 * i % 60 for i in range(16)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), "llama", MIXED)


def prompt(number: int) -> list[int]:
    return [(31 * number + 7 * i) % 97 for i in range(LENGTHS[number] + 1)]


def blocks(number: int) -> list[int]:
    return [2 * number, 2 * number + 1]


def logits(forward: OpenVinoForward, slices: list[Slice]) -> torch.Tensor:
    return forward.logits((), forward.prepare(forward.arrays(slices))).clone()


def ready(folder: Path, **options: object) -> OpenVinoForward:
    """It has computed all but the last token of 16 sequences, every second one with an adapter."""
    forward: OpenVinoForward = load(folder, kv_cache_tokens=32 * 32, lora=True, **options)._forward
    load_adapter(forward, 1)
    for number, length in enumerate(LENGTHS):
        slices = [Slice(prompt(number)[:length], 0, blocks(number), (DRAW,), adapter_slot=number % 2)]
        logits(forward, slices)
    return forward


def last(number: int) -> Slice:
    return Slice(prompt(number)[-1:], LENGTHS[number], blocks(number), (DRAW,), adapter_slot=number % 2)


@pytest.mark.parametrize("activations", [True, False])
def test_rows_have_the_same_bits_in_any_batch(pair: tuple[Path, Path], activations: bool) -> None:
    forward = ready(pair[0], quantized_activations=activations)
    alone = torch.cat([logits(forward, [last(number)]) for number in range(16)])
    for first, size in ((0, 2), (5, 7), (0, 16)):
        batched = logits(forward, [last(number) for number in range(first, first + size)])
        assert torch.equal(batched, alone[first : first + size]), f"batch of {size} from {first}"


def test_adapters_add_to_the_products(pair: tuple[Path, Path]) -> None:
    found, expected = (
        logits(ready(folder, **own), [last(number) for number in range(16)])
        for folder, own in zip(pair, ({"quantized_activations": False}, {}), strict=True)
    )
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_stream_continues_from_the_blocks_of_a_dead_engine(pair: tuple[Path, Path], shared_memory: Path) -> None:
    def load_in(folder: PoolFolder) -> ModelRunner:
        return load(pair[0], extensions=Extensions(pool_folder=folder), kv_cache_tokens=512)

    check_takeover(load_in, shared_memory)
