"""The text of a real ring is what the tokenizer decodes: streamed, unstreamed, and cut at any stop string."""

import asyncio

import pytest
from tokenizers import Tokenizer

from sluice import AsyncClient, tiny_model

PROMPTS = [
    '"""Umlauts: äöü, emoji: 😀🎉',
    "def f(x):\n    ",
    "# \u200d\u0301 日本語",
    "<|im_start|>user\nhi<|im_end|>",
    "\xff\x00",
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json"))


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("interval", [1, 7])
async def test_the_text_is_what_the_tokenizer_decodes(ring, tokenizer, skip, interval):
    async def check(client: AsyncClient, prompt: str, seed: int) -> None:
        # A high temperature without filters samples invalid bytes, parts of characters and special tokens.
        spec = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "seed": seed, "max_tokens": 120, "ignore_eos": True}
        spec |= {"token_ids": True, "skip_special_tokens": skip}
        ids: list[int] = []
        text = ""
        async for chunk in client.stream(prompt, stream_interval=interval, **spec):
            ids += chunk.token_ids
            text += chunk.text
        assert len(ids) == 120
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)
        (unstreamed,) = (await client.generate(prompt, **spec)).outputs
        assert (unstreamed.text, list(unstreamed.token_ids)) == (text, ids)

    async with AsyncClient(ring.address, timeout=100) as client:
        await asyncio.gather(*(check(client, prompt, seed) for prompt in PROMPTS for seed in range(4)))


async def test_a_stop_string_anywhere_cuts_text_and_tokens(ring, tokenizer):
    async with AsyncClient(ring.address, timeout=100) as client:
        spec = {"temperature": 0.9, "seed": 3, "max_tokens": 40, "ignore_eos": True, "token_ids": True}
        (free,) = (await client.generate("def walk(path):\n", **spec)).outputs

        async def check(start: int, length: int, include: bool) -> None:
            stop = free.text[start : start + length]
            (cut,) = (
                await client.generate("def walk(path):\n", stop=[stop], include_stop_in_output=include, **spec)
            ).outputs
            position = free.text.index(stop)
            assert cut.text == free.text[: position + (len(stop) if include else 0)]
            assert (cut.finish_reason, cut.stop_string) == ("stop_string", stop)
            assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
            assert stop in tokenizer.decode(list(cut.token_ids))
            assert stop not in tokenizer.decode(list(cut.token_ids[:-1]))

        starts = range(0, len(free.text) - 5, 3)
        await asyncio.gather(*(check(start, 1 + start % 5, bool(start % 2)) for start in starts))


async def test_echo_puts_the_prompt_first(ring):
    async with AsyncClient(ring.address, timeout=100) as client:
        spec = {"temperature": 0.0, "max_tokens": 8}
        plain = await client.generate("import os", **spec)
        echoed = await client.generate("import os", echo=True, **spec)
        assert echoed.text == "import os" + plain.text
        assert echoed.usage.completion_tokens == plain.usage.completion_tokens


async def test_the_cumulative_logprob_is_the_sum_over_the_tokens(ring):
    async with AsyncClient(ring.address, timeout=100) as client:
        result = await client.generate("import os", temperature=0.0, max_tokens=8, logprobs=3, token_ids=True)
        (output,) = result.outputs
        assert [entry.token_id for entry in output.logprobs] == list(output.token_ids)
        assert all(entry.rank == 1 and len(entry.top) == 3 for entry in output.logprobs)
        assert all(entry.top[0].token_id == entry.token_id for entry in output.logprobs)
        assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs), abs=1e-4)
        assert b"".join(entry.token for entry in output.logprobs).decode("utf-8", "replace") == output.text


async def test_prefixes_are_cached_separately_for_each_salt(ring):
    async with AsyncClient(ring.address, timeout=100) as client:
        prompt = "# a long prefix " * 20
        spec = {"temperature": 0.0, "max_tokens": 4}
        first = await client.generate(prompt, kv_cache={"salt": "a"}, **spec)
        repeated = await client.generate(prompt, kv_cache={"salt": "a"}, **spec)
        other_salt = await client.generate(prompt, kv_cache={"salt": "b"}, **spec)
        assert first.usage.cached_tokens == other_salt.usage.cached_tokens == 0
        assert repeated.usage.cached_tokens >= repeated.usage.prompt_tokens - 32
        assert first.text == repeated.text == other_salt.text
