"""Adapters that are loaded, replaced and unloaded many times a second, and hostile ones, beside running streams."""

import asyncio
import itertools
import json
import time
from collections import Counter

import pytest

from sluice import AsyncClient, tiny_model
from sluice.client import AdapterNotFound, InvalidRequest
from sluice.launch import Ring
from tests.attacks.damage import MAX_GROWTH, MAX_RATIO, NOISE_SECONDS, Memory
from tests.engine_worker.lora import oracle

pytestmark = [pytest.mark.long, pytest.mark.process, pytest.mark.timeout(300)]

PROMPT = [40, 41, 42, 300, 301, 302, 17, 5]
LONG = {"max_tokens": 400, "ignore_eos": True, "temperature": 0.0, "token_ids": True}
CHANGES_PER_SECOND = 10
ROUNDS = 3
ENGINE = {"lora": True, "dtype": "float32", "threads": 1, "kv_cache_tokens": 16384}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("adapters")
    names = {"steady": 1, "first": 2, "second": 3}
    return {
        name: oracle.write_adapter(root / name, tiny_model.path(), seed=seed, rank=8) for name, seed in names.items()
    }


def hostile_folders(root, good):
    """Folders of adapters that cannot be served."""
    weights = (good / "adapter_model.safetensors").read_bytes()
    config = json.loads((good / "adapter_config.json").read_text())
    start = 8 + int.from_bytes(weights[:8], "little")
    header = json.loads(weights[8:start])
    name = next(iter(header.keys() - {"__metadata__"}))
    shapes = json.dumps({**header, name: {**header[name], "shape": [1 << 20, 1 << 14]}}).encode()
    contents = {
        "length": (b"\xff" * 8 + weights[8:], config),
        "shape": (len(shapes).to_bytes(8, "little") + shapes + weights[start:], config),
        "values": (weights[:-4] + b"\x00\x00\x80\x7f", config),
        "rank": (weights, {**config, "r": 10**6}),
        "pattern": (weights, {**config, "rank_pattern": {".*" * 100: 4}}),
    }
    for name, (data, options) in contents.items():
        (root / name).mkdir()
        (root / name / "adapter_model.safetensors").write_bytes(data)
        (root / name / "adapter_config.json").write_text(json.dumps(options))
        yield root / name


async def streams(client: AsyncClient) -> tuple[list[list[int]], float]:
    """Tokens of streams with and without an adapter, and the seconds that all took."""
    began = time.perf_counter()
    results = await asyncio.gather(
        *(client.generate(PROMPT, **LONG, **options) for options in 2 * [{}, {"lora_id": "steady"}])
    )
    return [list(result.outputs[0].token_ids) for result in results], time.perf_counter() - began


async def change(client: AsyncClient, folders, hostile, done: Counter[str]) -> None:
    """Load, use, replace and unload adapters, by path and as uploads, until cancelled."""
    for number, bad in zip(itertools.count(), itertools.cycle(hostile), strict=False):
        began = time.monotonic()
        folder = folders[("first", "second")[number % 2]]
        kind = ("path", "upload", "use", "unload", "hostile")[number % 5]
        if kind in ("path", "upload"):
            await client.load_lora("changing", **({"path": str(folder)} if kind == "path" else {"folder": folder}))
        elif kind == "use":
            await client.generate(PROMPT, lora_id="changing", max_tokens=2)
        elif kind == "unload":
            await client.unload_lora("changing")
        else:
            with pytest.raises(InvalidRequest, match=r"adapter_model\.safetensors|adapter_config\.json|rank|finite"):
                raise_answer(await client.load_lora("bad", folder=bad))
        done[kind] += 1
        await asyncio.sleep(max(0.0, began + 1 / CHANGES_PER_SECOND - time.monotonic()))


def raise_answer(answers) -> None:
    for answer in answers:
        if answer.error is not None:
            raise answer.error


async def test_changes_of_adapters_beside_streams(folders, tmp_path):
    hostile = list(hostile_folders(tmp_path, folders["first"]))
    engine = ENGINE | {"lora_folders": [str(folders["steady"].parent)]}
    with Ring(engines=1, detokenizers=1, engine_args=engine) as ring:
        async with AsyncClient(ring.address, timeout=100) as client:
            await client.load_lora("steady", path=str(folders["steady"]))
            await streams(client)
            memory, done = Memory(ring.pids), Counter()
            right, alone = await streams(client)
            changes = asyncio.ensure_future(change(client, folders, hostile, done))
            for _ in range(ROUNDS):
                found, beside = await streams(client)
                memory.sample()
                assert found == right
                assert beside <= MAX_RATIO * alone + NOISE_SECONDS
                print(f"{alone:.2f} s alone, {beside:.2f} s beside {dict(done)}; memory grew by {memory.growth}")
            assert not changes.done(), changes.exception()
            changes.cancel()
            with pytest.raises((asyncio.CancelledError, AdapterNotFound)):
                await changes
    assert max(memory.growth.values()) <= MAX_GROWTH
    assert sum(done.values()) > 5
