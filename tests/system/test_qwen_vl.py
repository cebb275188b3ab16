"""Qwen2-VL on a real ring, compared with transformers: every form of prompt, and an engine that is killed."""

from pathlib import Path

import pytest

from sluice import Client
from sluice.launch import Ring
from tests.fakes.llava import picture
from tests.fakes.qwen_vl import IMAGE, write_qwen_vl
from tests.parity.qwen_vl_oracle import Oracle
from tests.system.streams_over_a_death import GREEDY, streams_over_a_death


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_qwen_vl(tmp_path_factory.mktemp("qwen_vl"))


@pytest.fixture(scope="module")
def pair(folder):
    with Ring(str(folder), engines=2, detokenizers=1, router_args={"peer_timeout": 5.0}) as ring:
        yield ring


@pytest.fixture(scope="module")
def oracle(folder) -> Oracle:
    return Oracle(folder)


def expected_tokens(oracle: Oracle, ids: list[int], images: list[bytes], count: int) -> list[int]:
    """`ids`: with one placeholder for each image."""
    data = iter(images)
    delimiters = (oracle.start, oracle.end)
    prompt = [next(data) if token == oracle.token_id else token for token in ids if token not in delimiters]
    return oracle.generate(prompt, max_new_tokens=count)


@pytest.mark.long
def test_text_token_ids_and_chats_may_have_images(pair, oracle):
    first, second = picture(1, (70, 20)), picture(2, (90, 200), "JPEG")
    text = f"user: {IMAGE}What is this?{IMAGE}\nassistant:"
    with Client(pair.address, timeout=100) as client:
        ids = list(client.tokenize(text, add_special_tokens=False).token_ids)
        expected = expected_tokens(oracle, ids, [first, second], 16)
        by_text = client.generate(text, images=[first, second], max_tokens=16, add_special_tokens=False, **GREEDY)
        assert list(by_text.outputs[0].token_ids) == expected
        by_ids = client.generate(ids, images=[first, second], max_tokens=16, **GREEDY)
        assert list(by_ids.outputs[0].token_ids) == expected
        assert by_ids.usage.prompt_tokens == by_text.usage.prompt_tokens > len(ids)
        # The router chose the engine that had cached the first prompt.
        assert by_ids.usage.cached_tokens > 16
        parts = [
            {"type": "image", "data": first},
            {"type": "text", "text": "What is this?"},
            {"type": "image", "data": second},
        ]
        by_chat = client.generate([{"role": "user", "content": parts}], max_tokens=16, **GREEDY)
        assert list(by_chat.outputs[0].token_ids) == expected
        (model,) = client.models()
        assert model.image_tokens == 30


@pytest.mark.long
async def test_streams_with_images_survive_the_death_of_their_engine(pair, oracle):
    sizes = ((70, 20), (20, 60), (40, 40))
    images = [[picture(2 * i, sizes[i % 3]), picture(2 * i + 1, sizes[(i + 1) % 3])] for i in range(6)]
    requests = [(f"{IMAGE} value_{i} = {IMAGE}", {"images": both}) for i, both in enumerate(images)]
    outputs, texts = await streams_over_a_death(pair, requests, 160)
    assert outputs == [expected_tokens(oracle, ids, both, 160) for both, ids in zip(images, texts, strict=True)]
