"""With tokenizers that strip the space at the start of a text, an output continues the text of its prompt: from HTTP
through a router to a detokenizer, and back."""

import shutil
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from detok_service.decoders import decoders_of
from sluice.checkpoint.folder import open_checkpoint
from sluice.tiny_model import path
from sluice.wire.rows import TokenBatch, TokenRow
from tests.detok_service.bench import LENGTH, Bench
from tests.fakes.gateway import running
from tests.fakes.ring_scripts import Call, Script

WORDS = ["▁upon", "▁a", "▁time"]
LETTERS = [*"onceupatimhr[]:", "▁"]
TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"


def like_llama2() -> Tokenizer:
    tokenizer = unigram()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(stages)
    return tokenizer


def like_t5() -> Tokenizer:
    tokenizer = unigram()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def unigram() -> Tokenizer:
    pieces = ["<unk>", *WORDS, *sorted({*LETTERS}), *(f"<0x{byte:02X}>" for byte in range(256))]
    return Tokenizer(models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], 0, byte_fallback=True))


def speaking(tokenizer: Tokenizer) -> Script:
    """An engine whose outputs are WORDS, one row each, and a detokenizer."""
    new = decoders_of(tokenizer).without_special

    async def speak(call: Call) -> None:
        submit, bench = call.submit, Bench(new=new)
        for offset, word in enumerate(WORDS):
            end = LENGTH if offset == len(WORDS) - 1 else None
            row = TokenRow(submit.request, submit.attempt, 0, offset, [tokenizer.token_to_id(word)], [], end)
            bench.handle(TokenBatch.of("engine", 1, [] if offset else [submit.opening()], [row]))
        await call.send(*bench.lanes[submit.router].rows(), start=True)

    return speak


@pytest.fixture(params=[like_llama2, like_t5])
async def gateway(request, ring, start, tmp_path):
    tokenizer = request.param()
    assert tokenizer.decode([tokenizer.token_to_id(word) for word in WORDS]) == "upon a time", "the space is stripped"
    folder = shutil.copytree(path(), tmp_path / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    ring.add_engine()
    ring.add_detokenizer()
    ring.script = speaking(tokenizer)
    client = await start(checkpoint=replace(open_checkpoint(str(folder)), chat_template=TEMPLATE))
    async with running(f"127.0.0.1:{client.router.port}") as gateway:
        yield gateway


async def text_of(gateway, path: str, **fields) -> str:
    """The text of a stream, which equals that of a whole answer."""
    fields |= {"max_tokens": len(WORDS)}
    answer = await gateway.post(path, **fields)
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    chunks = [chunk["choices"] for chunk in (await gateway.events(path, **fields))[:-1]]
    if "chat" in path:
        text = choice["message"]["content"]
        assert "".join(part["delta"].get("content") or "" for parts in chunks for part in parts) == text
    else:
        text = choice["text"]
        assert "".join(part["text"] for parts in chunks for part in parts) == text
    return text


async def test_completions(gateway):
    assert await text_of(gateway, "/v1/completions", prompt="once") == " upon a time"
    assert await text_of(gateway, "/v1/completions", prompt="once", echo=True) == "once upon a time"


async def test_stop_strings_that_begin_with_the_space(gateway):
    for stop, shown in [(" upon", ""), (" a", " upon"), (" upon a time", ""), ("upon", " ")]:
        for echo in (False, True):
            text = await text_of(gateway, "/v1/completions", prompt="once", stop=[stop], echo=echo)
            assert text == ("once" if echo else "") + shown


async def test_the_last_message_of_a_chat_is_continued(gateway):
    messages = [{"role": "user", "content": "o"}, {"role": "assistant", "content": "once"}]
    fields = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    assert await text_of(gateway, "/v1/chat/completions", **fields) == " upon a time"
    assert await text_of(gateway, "/v1/chat/completions", stop=[" a"], **fields) == " upon"
