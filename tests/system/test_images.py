"""Images on a real ring, compared with transformers: the examples, malformed images, and an engine that is killed."""

import re
from pathlib import Path

import pytest

from sluice import Client
from sluice.client import InvalidRequest
from sluice.launch import Ring
from tests.fakes.llava import ROWS, picture, write_llava
from tests.parity.llava_oracle import Oracle
from tests.parity.vision import Prompt
from tests.system.streams_over_a_death import GREEDY, streams_over_a_death
from tests.system.test_examples import run

PAGE = Path(__file__).parents[2] / "docs" / "images.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


@pytest.fixture(scope="module")
def pair(folder):
    with Ring(str(folder), engines=2, detokenizers=1, router_args={"peer_timeout": 5.0}) as ring:
        yield ring


@pytest.fixture(scope="module")
def oracle(folder) -> Oracle:
    return Oracle(folder)


def with_images(oracle: Oracle, ids: list[int], images: list[bytes]) -> Prompt:
    """The token ids with an image in place of each placeholder."""
    remaining = iter(images)
    return [next(remaining) if token == oracle.token_id else token for token in ids]


def test_text_token_ids_and_chats_may_have_images(pair, oracle):
    first, second = picture(1), picture(2, (200, 90), "JPEG")
    text = "USER: <image>\n<image>\nWhat is this? ASSISTANT:"
    with Client(pair.address, timeout=100) as client:
        ids = list(client.tokenize(text, add_special_tokens=False).token_ids)
        right = oracle.generate(with_images(oracle, ids, [first, second]), max_new_tokens=16)
        by_text = client.generate(text, images=[first, second], max_tokens=16, add_special_tokens=False, **GREEDY)
        assert list(by_text.outputs[0].token_ids) == right
        assert by_text.usage.prompt_tokens == len(ids) - 2 + 2 * ROWS
        by_ids = client.generate(ids, images=[first, second], max_tokens=16, **GREEDY)
        assert list(by_ids.outputs[0].token_ids) == right
        # The router chose the engine that had cached the first prompt.
        assert by_ids.usage.cached_tokens > ROWS
        parts = [
            {"type": "image", "data": first},
            {"type": "text", "text": "What is this?"},
            {"type": "image", "data": second},
        ]
        by_chat = client.generate([{"role": "user", "content": parts}], max_tokens=16, **GREEDY)
        assert list(by_chat.outputs[0].token_ids) == right
        (model,) = client.models()
        assert model.image_tokens == ROWS
        assert "images" in model.capabilities


def test_malformed_images_are_refused(pair):
    good = picture(1)
    with Client(pair.address, timeout=100) as client:
        for data, reason in (
            (good[:-50], r"images\[0\].data: is broken or truncated"),
            (b"GIF89a", "is not a PNG, JPEG or WebP image"),
            (b"", "is empty"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                client.generate("<image>", images=[data])
        with pytest.raises(InvalidRequest, match="has 2 image placeholders"):
            client.generate("<image><image>", images=[good])
        assert client.generate("<image>", images=[good], max_tokens=2).usage.completion_tokens > 0


@pytest.mark.long
def test_the_example_of_the_page_works(pair, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photo.png").write_bytes(picture(3))
    (example,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(example.replace("127.0.0.1:50051", pair.address), {})
    assert capsys.readouterr().out.splitlines()[-1] == f"{ROWS} tokens per image"


@pytest.mark.long
def test_the_python_example_works(pair, tmp_path):
    (tmp_path / "photo.png").write_bytes(picture(4))
    size, *lines = run("images.py", pair.address, str(tmp_path / "photo.png"), "What is this?").stdout.splitlines()
    assert size == f"an image takes up to {ROWS} tokens"
    assert [line.partition("? ")[0] for line in lines[::2]] == ["What is this", "Which colours does it have"]
    counts = [re.fullmatch(r"(\d+) of (\d+) prompt tokens were cached", line).groups() for line in lines[1::2]]
    # How many are cached depends on which engine answers.
    assert [int(cached) < int(prompt) > ROWS for cached, prompt in counts] == [True, True]


@pytest.mark.long
async def test_streams_with_images_survive_the_death_of_their_engine(pair, oracle):
    images = [[picture(2 * i), picture(2 * i + 1)] for i in range(6)]
    requests = [(f"<image> value_{i} = <image>", {"images": both}) for i, both in enumerate(images)]
    outputs, texts = await streams_over_a_death(pair, requests, 160)
    prompts = [with_images(oracle, ids, both) for ids, both in zip(texts, images, strict=True)]
    assert outputs == [oracle.generate(prompt, max_new_tokens=160) for prompt in prompts]
