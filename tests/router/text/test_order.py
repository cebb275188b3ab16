"""In the router's text threads, prompts come before all other work, whichever call brings it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sluice.checkpoint.folder import open_checkpoint
from sluice.v1 import generation_pb2 as pb
from tests.fakes.llava import ROWS, picture, write_files
from tests.router.conftest import text_spec

CHAT = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")])
ROW = pb.Embeddings(shape=[1, 2], dtype="float32", data=bytes(8))
OTHER_WORK: dict[str, Callable[[Any], Any]] = {
    "Tokenize of a text": lambda client: client.generation.Tokenize(pb.TokenizeRequest(text="x")),
    "Tokenize of a chat": lambda client: client.generation.Tokenize(pb.TokenizeRequest(chat=CHAT)),
    "Detokenize": lambda client: client.generation.Detokenize(pb.DetokenizeRequest(token_ids=[5])),
    "an image": lambda client: client.generate(text_spec("<image>", images=[pb.Image(data=picture(1))])),
    "a prompt table": lambda client: client.generate(text_spec("x", prompt_table=pb.PromptTable(embeddings=ROW))),
}
"""Calls whose work in the threads is no prompt. The texts of the last two are short: no thread tokenizes them."""


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return open_checkpoint(str(write_files(tmp_path_factory.mktemp("llava"))), "llava")


@pytest.mark.parametrize("name", OTHER_WORK)
async def test_a_chat_comes_before_other_work_that_waits(ring, start, llava, monkeypatch, name):
    ring.add_engine().image_rows = ROWS
    ring.add_detokenizer()
    client = await start(checkpoint=llava, text_threads=1)
    threads = client.router._text._threads
    entered, ended = record(threads, monkeypatch)
    may_continue = threading.Event()
    busy = asyncio.ensure_future(threads.run(lambda: may_continue.wait(60), 1))
    await client.until(lambda: len(entered) == 1)
    other = asyncio.ensure_future(OTHER_WORK[name](client))
    await client.until(lambda: len(entered) == 2)
    chat = asyncio.ensure_future(client.generate(pb.GenerationSpec(chat=CHAT)))
    await client.until(lambda: len(entered) == 3)
    may_continue.set()
    await asyncio.gather(busy, other, chat)
    assert [entered.index(job) for job in ended] == [0, 2, 1]


def record(threads, monkeypatch) -> tuple[list[Any], list[Any]]:
    """The jobs of the threads from now on: as they were submitted, and as they ended."""
    entered: list[Any] = []
    ended: list[Any] = []
    enter, end = threads._enter, threads._end

    def record_entry(job) -> None:
        entered.append(job)
        enter(job)

    def record_end(job, *rest) -> None:
        ended.append(job)
        end(job, *rest)

    monkeypatch.setattr(threads, "_enter", record_entry)
    monkeypatch.setattr(threads, "_end", record_end)
    return entered, ended
