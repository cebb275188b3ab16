import asyncio
import json
import shutil
import threading
from dataclasses import replace

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from router.text.tokenizer_pool import INLINE_BYTES, TokenizerPool
from sluice.checkpoint.folder import open_checkpoint
from sluice.tiny_model import path
from sluice.v1 import generation_pb2 as pb
from tests.fakes.tokenizers import metaspace, sentencepiece

REFERENCE = AutoTokenizer.from_pretrained(path())


@pytest.mark.parametrize("text", ["", "def f(x):\n    return 'é😀'\n", "<|im_start|>user\n", "a" * 5000, "\x00\u200d"])
async def test_tokenize_and_detokenize(client, text):
    ids = list((await client.generation.Tokenize(pb.TokenizeRequest(text=text))).token_ids)
    assert ids == REFERENCE(text)["input_ids"]
    for skip in (True, False):
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip)
        assert (await client.generation.Detokenize(request)).text == REFERENCE.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize("generates", [True, False])
async def test_tokens_of_a_chat(client, generates):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def f(é):"}]
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(**message) for message in messages])
    if not generates:
        chat.template_kwargs["add_generation_prompt"] = False
    ids = list((await client.generation.Tokenize(pb.TokenizeRequest(chat=chat))).token_ids)
    expected = REFERENCE.apply_chat_template(messages, add_generation_prompt=generates, tokenize=False)
    assert ids == REFERENCE(expected, add_special_tokens=False)["input_ids"]


async def test_offsets_are_code_points(client):
    text = "x = 'é😀' # ok"
    answer = await client.generation.Tokenize(pb.TokenizeRequest(text=text, offsets=True))
    assert len(answer.offsets) == len(answer.token_ids)
    assert answer.offsets[0].start == 0
    assert answer.offsets[-1].end == len(text)
    spans = {text[offset.start : offset.end] for offset in answer.offsets}
    assert "😀" in spans or any("😀" in span for span in spans)
    without = await client.generation.Tokenize(pb.TokenizeRequest(text=text))
    assert not without.offsets


async def test_invalid_utf8_becomes_replacement_characters(client):
    ids = list((await client.generation.Tokenize(pb.TokenizeRequest(text="😀"))).token_ids)
    if len(ids) > 1:
        request = pb.DetokenizeRequest(token_ids=ids[:1])
        assert "\ufffd" in (await client.generation.Detokenize(request)).text


@pytest.mark.parametrize("tokenizer", [sentencepiece(), metaspace()], ids=["sentencepiece", "metaspace"])
def test_tokens_of_other_vocabularies_have_bytes_too(tmp_path, tokenizer):
    folder = shutil.copytree(path(), tmp_path / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    text = TokenizerPool(open_checkpoint(str(folder)), 1, 1)
    ids = [tokenizer.token_to_id(token) for token in ("▁the", "日本")]
    assert b"".join(map(text.vocabulary.bytes_of, ids)) == " the日本".encode()
    text.close()


@pytest.mark.parametrize("scheme", ["always", "first"])
async def test_words_are_tokenized_at_the_start_of_a_text_and_within_it(tmp_path, scheme):
    """If the tokenizer prepends a space to texts, a word without a space only occurs after other text."""
    pieces = ["<unk>", "▁", "\n", "import", "▁import", "(", "▁("]
    tokenizer = Tokenizer(models.Unigram([(piece, -float(len(piece) < 4)) for piece in pieces], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    folder = shutil.copytree(path(), tmp_path / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    text = TokenizerPool(open_checkpoint(str(folder)), 1, 1)
    (spellings,) = await text.spellings(["import"])
    after_bracket = tokenizer.encode("(import").ids[-1]
    assert after_bracket == pieces.index("import")
    assert [pieces.index("▁import")] in spellings
    assert [after_bracket] in spellings
    text.close()


@pytest.mark.parametrize("missing", [0, 1, 3])
async def test_a_tokenizer_that_exceeds_the_model_is_logged_at_the_start(ring, start, tmp_path, missing):
    folder = shutil.copytree(path(), tmp_path / "model")
    largest = max(Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values())
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = largest + 1 - missing
    (folder / "config.json").write_text(json.dumps(config))
    client = await start(wait=False, checkpoint=open_checkpoint(str(folder)))
    logged = [line for line in client.logs if line["event"] == "tokenizer_exceeds_model"]
    assert [(line["extra_tokens"], line["vocab_size"]) for line in logged] == (
        [(missing, config["vocab_size"])] if missing else []
    )


@pytest.mark.parametrize(
    ("template", "tool_use", "warns"),
    [
        ("{{ messages }}", None, True),
        ("{{ messages }}{{ tools }}", None, False),
        ("{{ messages }}", "{{ tools }}", False),
        ("{{ tools }}", "{{ messages }}", True),
        (None, None, False),
    ],
)
async def test_a_chat_template_without_tools_is_logged_at_the_start(start, checkpoint, template, tool_use, warns):
    templates = replace(checkpoint, chat_template=template, tool_use_template=tool_use)
    client = await start(wait=False, checkpoint=templates)
    logged = [line["effect"] for line in client.lines("chat_template_without_tools")]
    assert logged == (["chats with tools will be refused"] if warns else [])


async def test_the_last_prompt_tokens_are_kept(client, ring):
    ids = list(range(100, 200))
    await client.events(pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), truncate_prompt_tokens=3))
    await client.events(pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), truncate_prompt_tokens=300))
    assert [call.submit.prompt for call in ring.calls] == [[197, 198, 199], ids]


async def test_a_short_prompt_does_not_wait_for_the_threads(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(text_threads=1)
    may_continue = threading.Event()
    busy = asyncio.ensure_future(client.router._text._run(1, lambda: may_continue.wait(60)))
    short = "x = 1\n"
    long = short * (INLINE_BYTES // len(short) + 1)
    assert (await client.events(pb.GenerationSpec(text=short)))[-1].HasField("done")
    waiting = asyncio.ensure_future(client.events(pb.GenerationSpec(text=long)))
    await client.until(lambda: client.router._text._threads.unfinished == 2)
    may_continue.set()
    assert await busy
    assert (await waiting)[0].started.prompt_tokens == len(REFERENCE(long)["input_ids"])
    assert ring.calls[0].submit.prompt == REFERENCE(short)["input_ids"]
