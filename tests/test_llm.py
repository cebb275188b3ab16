"""`sluice.LLM`, with a real ring."""

import asyncio
import json

import numpy as np
import pytest
import torch

import sluice
from sluice import LLM, SamplingParams, tiny_model
from sluice.executor import KvCacheConfig

pytestmark = pytest.mark.process

HIDDEN_SIZE = json.loads((tiny_model.path() / "config.json").read_text())["hidden_size"]
PARAMS = SamplingParams(max_tokens=6, temperature=0, end_id=-1)


@pytest.fixture(scope="module")
def llm():
    with LLM(num_postprocess_workers=1, kv_cache_config=KvCacheConfig(event_buffer_max_size=1000)) as llm:
        yield llm


def test_list_of_prompts_and_single_prompt(llm) -> None:
    prompts = ["import ", {"prompt": "class "}, {"prompt_token_ids": [1, 2, 3, 4]}]
    found = llm.generate(prompts, PARAMS, use_tqdm=False)
    assert [result.finished for result in found] == [True] * 3
    assert found[2].outputs[0].token_ids == llm.generate([1, 2, 3, 4], PARAMS).outputs[0].token_ids
    assert found[1].outputs[0].text == llm.generate("class ", PARAMS).outputs[0].text
    assert found[0].prompt == "import "
    assert llm.generate([[1, 2], [3]], PARAMS, use_tqdm=False)[1].prompt_token_ids == [3]
    assert llm.generate([], PARAMS, use_tqdm=False) == []


def test_embeddings(llm) -> None:
    one, other = torch.full((3, HIDDEN_SIZE), 0.01), np.zeros((4, HIDDEN_SIZE), np.float16)
    found = llm.generate([{"prompt_embeds": one}, {"prompt_embeds": other}], PARAMS, use_tqdm=False)
    assert [len(result.outputs[0].token_ids) for result in found] == [6, 6]
    alone = llm.generate({"prompt_embeds": one}, PARAMS)
    assert alone.outputs[0].token_ids == found[0].outputs[0].token_ids
    with pytest.raises(TypeError, match="a prompt of embeddings has no token ids"):
        _ = alone.prompt_token_ids
    tuned = llm.generate("import ", PARAMS, prompt_table=one)
    assert len(tuned.outputs[0].token_ids) == 6


def test_generate_async(llm) -> None:
    whole = llm.generate("import ", PARAMS).outputs[0]
    assert llm.generate_async({"prompt": "import "}, PARAMS).result(60).outputs[0].text == whole.text
    parts = [result.outputs[0].text_diff for result in llm.generate_async("import ", PARAMS, streaming=True)]
    assert "".join(parts) == whole.text

    async def awaited() -> str:
        return (await llm.generate_async("import ", PARAMS)).outputs[0].text

    assert asyncio.run(awaited()) == whole.text


def test_chat(llm) -> None:
    assert llm.chat([{"role": "user", "content": "sort a list"}], PARAMS).outputs[0].token_ids


def test_chat_options(llm) -> None:
    def tokens(messages=({"role": "user", "content": "x"},), **options) -> int:
        return llm.chat(messages, PARAMS, **options).usage.prompt_tokens

    plain = tokens()
    assert tokens(add_generation_prompt=False) < plain
    assert tokens(add_generation_prompt=False, chat_template_kwargs={"add_generation_prompt": True}) < plain
    answered = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
    assert tokens(answered, continue_final_message=True) < tokens(answered)
    with pytest.raises(NotImplementedError, match="always use the checkpoint's template"):
        llm.chat([{"role": "user", "content": "x"}], chat_template="{{ messages }}")


def test_statistics(llm) -> None:
    llm.generate("import ", PARAMS)
    assert llm.get_stats(30)[-1].max_num_active_requests > 0

    async def one() -> int:
        steps = llm.get_stats_async(30)
        found = (await anext(steps)).max_num_active_requests
        await steps.aclose()
        return found

    llm.generate("import ", PARAMS)
    assert asyncio.run(one()) > 0


def test_cache_salt_per_prompt(llm) -> None:
    ids = list(range(1200, 1300))

    def cached(*prompts, **options) -> list[int]:
        return [each.usage.cached_tokens for each in llm.generate(prompts, PARAMS, use_tqdm=False, **options)]

    def salted(salt) -> dict:
        return {"prompt_token_ids": ids, "cache_salt": salt}

    assert cached(salted("a")) == [0]
    assert cached(salted("b"), salted("a")) == [0, 96]
    assert cached(ids, ids, cache_salt=["b", "c"]) == [96, 0]
    assert cached(ids, salted("a"), cache_salt="d") == [0, 96]
    assert llm.generate_async(salted("a"), PARAMS).result(60).usage.cached_tokens == 96


def test_names_that_are_not_supported(llm) -> None:
    for name in ("encode", "score", "tokenizer", "sleep"):
        assert not hasattr(llm, name)
        with pytest.raises(NotImplementedError, match=f"LLM.{name}: .+"):
            getattr(llm, name)
    with pytest.raises(AttributeError, match="no attribute 'encodes'"):
        llm.encodes("x")
    assert llm.get_default_sampling_params() == SamplingParams()
    assert llm.collective_rpc("memory")


def test_kv_cache_events(llm) -> None:
    llm.generate([list(range(2000, 2070))], PARAMS, use_tqdm=False)
    events = llm.get_kv_cache_events(30)
    assert [event["event_id"] for event in events] == list(range(len(events)))
    assert events[0]["data"]["type"] == "created"
    blocks = [event["data"]["blocks"][0] for event in events if event["data"]["type"] == "stored"]
    tokens = [token["token_id"] for block in blocks for token in block["tokens"] if token["token_id"] >= 2000]
    assert tokens[:64] == list(range(2000, 2064))
    assert json.loads(json.dumps(events)) == events

    async def later() -> list[str]:
        return [event["data"]["type"] async for event in llm.get_kv_cache_events_async(2)]

    llm.generate([list(range(2100, 2170))], PARAMS, use_tqdm=False)
    assert set(asyncio.run(later())) == {"stored"}


def test_a_prompt_of_unknown_shape(llm) -> None:
    for given in ({"text": "x"}, {"prompt": "x", "multi_modal_data": {}}, {}):
        with pytest.raises(TypeError, match="a prompt must have one of the keys"):
            llm.generate_async(given)


def test_names_of_the_package() -> None:
    assert all(getattr(sluice, name) is not None for name in sluice.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = sluice.nothing


@pytest.mark.quick(1)
@pytest.mark.parametrize("streaming", [False, True])
def test_request_statistics(llm, streaming) -> None:
    results = [llm.generate_async("y" * (i + 1), streaming=streaming, return_perf_metrics=i != 3) for i in range(4)]
    for result in results[:3]:
        stats = result.result(60).stats
        assert (stats.id, stats.stage) == (result.request_id, "generation_complete")
        assert stats.num_generated_tokens == result.usage.completion_tokens
        assert stats.num_prompt_tokens == result.usage.prompt_tokens
        assert 0 < stats.first_iter <= stats.iter
    assert results[3].result(60).stats is None
