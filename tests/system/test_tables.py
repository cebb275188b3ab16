"""Prompt tables on a real ring, compared with transformers: the page's example, and an engine that is killed."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from sluice import Client, tiny_model
from sluice.client import InvalidRequest
from sluice.launch import Ring
from tests.system.streams_over_a_death import GREEDY, streams_over_a_death

PAGE = Path(__file__).parents[2] / "docs" / "prompt_tables.md"


@pytest.fixture(scope="module")
def pair():
    with Ring(engines=2, detokenizers=1, router_args={"peer_timeout": 5.0}) as ring:
        yield ring


@pytest.fixture(scope="module")
def model():
    model = AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def expected(model, ids: list[int], rows, count: int) -> list[int]:
    """Tokens that transformers generates after the rows and the token ids."""
    embeds = torch.cat(
        [torch.as_tensor(rows).float(), model.get_input_embeddings()(torch.tensor(ids, dtype=torch.int64))]
    )[None]
    mask = torch.ones(embeds.shape[:2], dtype=torch.int64)
    return model.generate(inputs_embeds=embeds, attention_mask=mask, max_new_tokens=count, do_sample=False)[0].tolist()


def some_rows(model, count: int, seed: int) -> np.ndarray:
    size = model.config.hidden_size
    return np.random.default_rng(seed).normal(0, 0.05, (count, size)).astype(np.float32)


@pytest.mark.long
def test_text_token_ids_and_embeddings_may_have_tables(pair, model):
    rows, size = some_rows(model, 40, 0), model.config.vocab_size
    with Client(pair.address, timeout=100) as client:
        ids = list(client.tokenize("def area(radius):").token_ids)
        right = expected(model, ids, rows, 16)
        text = client.generate("def area(radius):", prompt_table=rows, max_tokens=16, echo=True, **GREEDY)
        assert list(text.outputs[0].token_ids) == right
        assert text.text.startswith("def area(radius):")
        assert text.usage.prompt_tokens == 40 + len(ids)
        by_ids = client.generate([*range(size, size + 40), *ids], prompt_table=rows, max_tokens=16, **GREEDY)
        assert list(by_ids.outputs[0].token_ids) == right
        # The router chose the engine that had cached the first prompt.
        assert by_ids.usage.cached_tokens > 0
        alone = client.generate({"prompt_embeds": rows}, max_tokens=16, **GREEDY)
        assert list(alone.outputs[0].token_ids) == expected(model, [], rows, 16)
        with pytest.raises(InvalidRequest, match="rows of 3 values, but the model's hidden size is"):
            client.generate({"prompt_embeds": np.zeros((2, 3))})


@pytest.mark.long
def test_the_example_of_the_page_works(pair, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("127.0.0.1:50051", pair.address), {})
    assert len(capsys.readouterr().out.splitlines()) >= 3


@pytest.mark.long
async def test_streams_with_tables_survive_the_death_of_their_engine(pair, model):
    tables = [some_rows(model, 5 + i, i) for i in range(6)]
    requests = [(f"value_{i} = ", {"prompt_table": rows}) for i, rows in enumerate(tables)]
    outputs, texts = await streams_over_a_death(pair, requests, 160)
    assert outputs == [expected(model, ids, rows, 160) for rows, ids in zip(tables, texts, strict=True)]
