import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import AutoTokenizer

from router.text import Text
from router.vocabulary import TokenBytes
from sluice.ring.checkpoint import open_checkpoint
from sluice.tiny_model import path
from sluice.v1 import generation_pb2 as pb

REFERENCE = AutoTokenizer.from_pretrained(path())
BYTES = TokenBytes(Text(open_checkpoint(str(path())), 1, 1, 1)._tokenizer)


@pytest.mark.parametrize("text", ["", "def f(x):\n    return 'é😀'\n", "<|im_start|>user\n", "a" * 5000, "\x00\u200d"])
async def test_tokenize_and_detokenize(client, text):
    ids = list((await client.generation.Tokenize(pb.TokenizeRequest(text=text))).token_ids)
    assert ids == REFERENCE(text)["input_ids"]
    for skip in (True, False):
        request = pb.DetokenizeRequest(token_ids=ids, skip_special_tokens=skip)
        assert (await client.generation.Detokenize(request)).text == REFERENCE.decode(ids, skip_special_tokens=skip)


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


async def test_broken_bytes_become_replacement_characters(client):
    ids = list((await client.generation.Tokenize(pb.TokenizeRequest(text="😀"))).token_ids)
    if len(ids) > 1:
        request = pb.DetokenizeRequest(token_ids=ids[:1])
        assert "\ufffd" in (await client.generation.Detokenize(request)).text


@settings(max_examples=200)
@given(st.text())
def test_the_bytes_of_tokens_joined_are_the_text(text):
    ids = REFERENCE(text)["input_ids"]
    assert b"".join(BYTES[token] for token in ids) == text.encode()


def test_bytes_of_special_and_unknown_ids():
    assert BYTES[4095] == b"<|im_end|>"
    assert BYTES[10**6] == b""


def test_other_vocabularies_have_no_bytes():
    tokenizer = Tokenizer(models.BPE({"a": 0, "▁a": 1}, []))
    tokenizer.decoder = decoders.Metaspace()
    assert TokenBytes(tokenizer)[1] == b""
    tokenizer.decoder = decoders.Sequence([])
    assert TokenBytes(tokenizer)[0] == b""


async def test_the_last_prompt_tokens_are_kept(client, ring):
    ids = list(range(100, 200))
    await client.events(pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), truncate_prompt_tokens=3))
    await client.events(pb.GenerationSpec(token_ids=pb.TokenIds(ids=ids), truncate_prompt_tokens=300))
    assert [call.submit.prompt for call in ring.calls] == [[197, 198, 199], ids]
