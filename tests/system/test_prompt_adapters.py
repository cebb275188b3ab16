"""Prompt adapters on a real ring: peft's folders return peft's tokens, and engines store tables for new routers."""

import asyncio
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from peft import PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

from sluice import Client, tiny_model
from sluice.checkpoint.folder import open_checkpoint
from sluice.client import Unavailable
from sluice.launch import Ring
from tests.fakes.processes import LIMIT, wait_until
from tests.fakes.prompt_files import write
from tests.system.followed_streams import disturbed_streams
from tests.system.test_examples import run

pytestmark = pytest.mark.timeout(300)

PROMPT = "def "
OPTIONS = {"max_tokens": 200, "ignore_eos": True, "seed": 5, "token_ids": True}
NAMES = ("terse", "wordy", "")


def rows(seed: int) -> np.ndarray:
    hidden_size = open_checkpoint(tiny_model.path()).config["hidden_size"]
    return np.random.default_rng(seed).normal(0, 0.5, (8, hidden_size)).astype(np.float32)


class Tuned(NamedTuple):
    """A tuned prompt that peft has saved, and the tokens that peft generates with it."""

    folder: Path
    tokens: list[int]


def tune(folder: Path, prompt: list[int], **options) -> Tuned:
    base = AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", **options)).eval()
    (rows,) = (weight for weight in model.parameters() if weight.requires_grad)
    with torch.no_grad():
        # Moves the rows away from peft's initialization, as training does.
        rows += 0.05 * torch.randn(rows.shape, generator=torch.Generator().manual_seed(len(rows)))
    model.save_pretrained(folder)
    base.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    return Tuned(folder, output[0, len(prompt) :].tolist())


@pytest.fixture(scope="module")
def prompts(tmp_path_factory) -> Path:
    """A folder from which routers may load prompt adapters."""
    return tmp_path_factory.mktemp("prompts")


@pytest.fixture(scope="module")
def ring(prompts) -> Iterator[Ring]:
    options = {
        "engine_args": {"threads": 1, "kv_cache_tokens": 16384, "dtype": "float32"},
        "router_args": {"prompt_adapter_folders": [str(prompts)]},
    }
    with Ring(routers=2, engines=2, detokenizers=1, **options) as ring:
        yield ring


def adapter(name: str) -> dict:
    return {"prompt_adapter_id": name} if name else {}


def tokens(address: str, name: str) -> list[int]:
    with Client(address, timeout=LIMIT) as client:
        return list(client.generate(PROMPT, **OPTIONS, **adapter(name)).outputs[0].token_ids)


def adapter_versions(address: str) -> dict[str, str]:
    """Versions of the router's adapters by id; empty while the router does not run."""
    try:
        with Client(address, timeout=LIMIT, resume_timeout=1) as client:
            (listed,) = client.list_prompt_adapters()
            return {adapter.prompt_adapter_id: adapter.version for adapter in listed.prompt_adapters}
    except Unavailable:
        return {}


@pytest.mark.long
def test_folders_that_peft_saved_return_the_tokens_of_peft(ring, prompts) -> None:
    text = "def area(radius):"
    initial = {
        "prompt_tuning_init": "TEXT",
        "prompt_tuning_init_text": "import",
        "tokenizer_name_or_path": str(tiny_model.path()),
    }
    options = {"max_tokens": 16, "temperature": 0, "ignore_eos": True, "token_ids": True}
    with Client(ring.addresses, timeout=LIMIT) as client:
        prompt = list(client.tokenize(text).token_ids)
        tuned = [
            tune(prompts / "random", prompt, num_virtual_tokens=8),
            tune(prompts / "text", prompt, num_virtual_tokens=20, **initial),
        ]
        for folder, expected in tuned:
            client.load_prompt_adapter("uploaded", folder=folder)
            client.load_prompt_adapter("by-path", path=str(folder))
            for name in ("uploaded", "by-path"):
                assert list(client.generate(text, **options, **adapter(name)).outputs[0].token_ids) == expected
        plain = list(client.generate(text, **options).outputs[0].token_ids)
        for name in ("uploaded", "by-path"):
            client.unload_prompt_adapter(name)
    # The adapters do change the output.
    assert len({tuple(tokens) for tokens in (plain, *(expected for _, expected in tuned))}) == 3


@pytest.mark.long
@pytest.mark.parametrize("source", ["random", "tuned"])
def test_the_python_example_works(ring, prompts, source) -> None:
    folder = write(prompts / "example", rows(3))
    lines = run(
        "prompt_tables.py", ring.addresses[0], *([str(folder)] if source == "tuned" else [])
    ).stdout.splitlines()
    (prefix, *_), (model, table, *_, adapter) = zip(*(line.split(": ", 1) for line in lines), strict=True)
    assert prefix == "model"
    assert re.search(r" \(\d+ prompt tokens\)$", table)
    # Without a folder, the example loads the rows of its table as the adapter.
    assert table.startswith(adapter) == (source == "random")
    assert model != adapter
    assert "PromptAdapter(prompt_adapter_id='mine'" in lines[2]


@pytest.mark.long
async def test_a_restarted_router_receives_the_tables_from_the_engines(ring) -> None:
    first, second = ring.addresses
    with Client(first, timeout=LIMIT) as client:
        for seed, name in enumerate(("terse", "wordy")):
            client.load_prompt_adapter(name, rows=rows(seed))
    versions = adapter_versions(first)
    assert set(versions) == {"terse", "wordy"}
    assert wait_until(lambda: adapter_versions(second) == versions)
    expected = {name: await asyncio.to_thread(tokens, first, name) for name in NAMES}
    assert len({tuple(output) for output in expected.values()}) == len(NAMES)

    # After the second kill, no router is left to which the tables were uploaded.
    for router, address, surviving in (("router-0", first, second), ("router-1", second, first)):
        pid = ring.pids[router]

        def kill(pid: int = pid) -> None:
            os.kill(pid, signal.SIGKILL)

        streams = await disturbed_streams(surviving, PROMPT, [{**OPTIONS, **adapter(name)} for name in 2 * NAMES], kill)
        assert streams == 2 * [(expected[name], 0) for name in NAMES], "a stream changed or was resumed"
        assert await asyncio.to_thread(wait_until, lambda address=address: adapter_versions(address) == versions)
        assert ring.pids[router] != pid
        for name in NAMES:
            assert await asyncio.to_thread(tokens, address, name) == expected[name]

    # Replace the rows of an adapter at a restarted router: the other router receives the new ones.
    with Client(second, timeout=LIMIT) as client:
        client.load_prompt_adapter("terse", rows=rows(7))
    terse = versions["terse"]
    assert await asyncio.to_thread(wait_until, lambda: adapter_versions(first).get("terse", terse) != terse)
    changed = await asyncio.to_thread(tokens, first, "terse")
    assert changed == await asyncio.to_thread(tokens, second, "terse")
    assert changed != expected["terse"]
