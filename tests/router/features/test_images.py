"""Images in the router: rows replace placeholders, identically in every attempt; hostile images are refused."""

import asyncio
import struct
import zlib
from io import BytesIO

import PIL.Image
import pytest

from router.shares import SharedSpace
from sluice.checkpoint.folder import open_checkpoint
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.wire.hashing import block_chain, root_hash, short_hash
from sluice.wire.tables import MAX_IMAGE_BYTES, MAX_IMAGES, Image, PromptTables, VirtualTokens
from tests.fakes.llava import ROWS, picture, write_files
from tests.router.conftest import refused, text_spec
from tests.router.requests.broken_attempts import IDS, Script, check_whole, midway

FIRST, SECOND = picture(1), picture(2)


def images(*data: bytes) -> list[pb.Image]:
    return [pb.Image(data=each) for each in data]


def wire(*data: bytes) -> PromptTables:
    return PromptTables(images=tuple(Image.of(ROWS, image) for image in data))


def chat(*parts: str | bytes, **options) -> pb.GenerationSpec:
    message = pb.ChatMessage(role="user", parts=map(part_of, parts))
    return pb.GenerationSpec(chat=pb.ChatPrompt(messages=[message], **options))


def part_of(part: str | bytes) -> pb.ContentPart:
    return pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(image=pb.Image(data=part))


@pytest.fixture(scope="module")
def llava(tmp_path_factory):
    return open_checkpoint(str(write_files(tmp_path_factory.mktemp("llava"))), "llava")


@pytest.fixture
def vocab_size(llava) -> int:
    return llava.vocab_size


@pytest.fixture
async def client(ring, start, llava):
    ring.add_engine().image_rows = ROWS
    ring.add_detokenizer()
    return await start(checkpoint=llava)


async def ids_of(client, text: str) -> list[int]:
    response = await client.generation.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False))
    return list(response.token_ids)


async def test_the_next_attempt_has_the_same_images(client, ring):
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec("x <image> 1", images=images(FIRST), output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 60)
    (engine,) = ring.engines.values()
    engine.epoch += 1
    events = await task
    first, second = (call.submit for call in script.attempts)
    assert (first.prompt, first.extras.tables) == (second.prompt, second.extras.tables)
    assert first.extras.tables == wire(FIRST)
    check_whole(events, second, 1)


async def test_rows_replace_placeholders(client, ring, vocab_size, llava):
    placeholder = llava.vision.token_id
    rows = list(range(vocab_size, vocab_size + 3 * ROWS))
    ids_before, ids_after = await ids_of(client, "see "), await ids_of(client, " and")
    table = pb.PromptTable(embeddings=pb.Embeddings(shape=[3, 2], dtype="float16", data=bytes(12)))
    specs = [
        pb.GenerationSpec(
            text="see <image> and<image><image>", images=images(FIRST, SECOND, FIRST), add_special_tokens=False
        ),
        pb.GenerationSpec(token_ids=pb.TokenIds(ids=[placeholder, 5, placeholder]), images=images(FIRST, SECOND)),
        pb.GenerationSpec(token_ids=pb.TokenIds(ids=[vocab_size + 1, placeholder]), images=images(FIRST)),
    ]
    specs[2].prompt_table.CopyFrom(table)
    responses = [await client.generate(spec) for spec in specs]
    first, second, third = (call.submit for call in ring.calls)
    assert first.prompt == [*ids_before, *rows[:ROWS], *ids_after, *rows[ROWS:]]
    assert first.extras.tables == wire(FIRST, SECOND, FIRST)
    assert second.prompt == [*rows[:ROWS], 5, *rows[ROWS : 2 * ROWS]]
    # The ids of images follow the rows of the table.
    assert third.prompt == [vocab_size + 1, *range(vocab_size + 3, vocab_size + 3 + ROWS)]
    assert third.extras.tables.images == wire(FIRST).images
    assert [response.usage.prompt_tokens for response in responses] == [len(first.prompt), 2 * ROWS + 1, ROWS + 1]


async def test_chats(client, ring, vocab_size):
    """The template puts images first, like LLaVA's, and gets text contents as parts."""
    await client.generate(chat("What is this?", FIRST, SECOND))
    spec = chat(FIRST, "Go on", continue_final_message=True)
    spec.chat.messages.insert(0, pb.ChatMessage(role="system", content="Be brief."))
    await client.generate(spec)
    first, second = (call.submit for call in ring.calls)
    start, line, rows = await ids_of(client, "USER: "), await ids_of(client, "\n"), range(vocab_size, 1 << 30)
    end = await ids_of(client, "\nWhat is this? ASSISTANT:")
    assert first.prompt == [*start, *rows[:ROWS], *line, *rows[ROWS : 2 * ROWS], *end]
    assert first.extras.tables == wire(FIRST, SECOND)
    assert second.prompt[: len(await ids_of(client, "SYSTEM: Be brief. USER: "))] == await ids_of(
        client, "SYSTEM: Be brief. USER: "
    )
    assert second.prompt[-len(await ids_of(client, "\nGo on")) :] == await ids_of(client, "\nGo on")


async def test_templates_that_need_text_get_parts_as_one_text(ring, start, tmp_path):
    folder = write_files(tmp_path)
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}")
    checkpoint = open_checkpoint(str(folder), "llava")
    ring.add_engine().image_rows = ROWS
    ring.add_detokenizer()
    client = await start(checkpoint=checkpoint)
    await client.generate(chat("What is ", FIRST, "?"))
    (call,) = ring.calls
    first = checkpoint.vocab_size
    expected = [*await ids_of(client, "user: What is "), *range(first, first + ROWS), *await ids_of(client, "?")]
    assert call.submit.prompt == expected


async def test_a_request_goes_where_its_own_images_are_cached(ring, start, llava, vocab_size):
    ids = [*range(20), *range(vocab_size, vocab_size + 2 * ROWS)]
    engines = [ring.add_engine(name) for name in ("a", "b")]
    for engine, data in zip(engines, (FIRST, SECOND), strict=True):
        engine.image_rows = ROWS
        virtual = VirtualTokens.of(vocab_size, wire(data, data))
        chain = block_chain(root_hash("fingerprint"), ids, 16, virtual.key)
        engine.journal.store(*map(short_hash, chain))
    ring.add_detokenizer()
    client = await start(checkpoint=llava)
    placement = client.router.ring.placement
    await client.until(lambda: all(placement.cache_version(fake_engine.epoch) == 3 for fake_engine in engines))
    placeholder = llava.vision.token_id
    for data in (SECOND, FIRST, SECOND):
        prompt = pb.TokenIds(ids=[*range(20), placeholder, placeholder])
        await client.generate(pb.GenerationSpec(token_ids=prompt, images=images(data, data)))
    placements = [(call.engine, bytes(call.submit.extras.tables.images[0].data)) for call in ring.calls]
    first, second = engines
    assert sorted(placements, key=lambda placement_entry: placement_entry[0].name) == [
        (first, FIRST),
        (second, SECOND),
        (second, SECOND),
    ]


async def test_the_next_question_about_an_image_goes_to_the_same_engine(ring, start, llava):
    """Even before any engine has reported its cache."""
    for name in ("a", "b"):
        ring.add_engine(name).image_rows = ROWS
    ring.add_detokenizer()
    client = await start(checkpoint=llava)
    for text in ("What is this? ", "Where is it? ", "And when? "):
        for data in (FIRST, SECOND):
            await client.generate(text_spec("<image>" * 4 + text, images=images(*[data] * 4)))
    for data in (FIRST, SECOND):
        engines = {call.engine.name for call in ring.calls if call.submit.extras.tables.images[0].data == data}
        assert len(engines) == 1


async def test_only_engines_that_support_images_get_them(ring, start, llava):
    engine = ring.add_engine()
    ring.add_detokenizer()
    client = await start(checkpoint=llava)
    (model,) = (await client.models.ListModels(admin_pb2.ListModelsRequest())).models
    assert (model.image_tokens, list(model.capabilities)) == (0, ["chat"])
    details = await refused(client.events(text_spec("<image>", images=images(FIRST))))
    assert "no engine supports images" in details.bad.field_violations[0].description
    await client.generate(text_spec("a text"))
    engine.image_rows = ROWS
    await client.until(lambda: client.router.ring.membership.engines.all[0].heartbeat.offers >= {f"image_rows:{ROWS}"})
    (model,) = (await client.models.ListModels(admin_pb2.ListModelsRequest())).models
    assert (model.image_tokens, list(model.capabilities)) == (ROWS, ["chat", "images"])


def bomb() -> bytes:
    """A PNG of 400 bytes whose header claims 10^10 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", 100_000, 100_000, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(9000))) + chunk(b"IEND", b"")
    )


def blank(width: int, height: int) -> bytes:
    file = BytesIO()
    PIL.Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


NOISE = picture(3, (1000, 1000), "PNG")
REFUSED = [
    (text_spec("<image>", images=images(FIRST[:-30])), "spec.images[0].data", "is broken or truncated"),
    (text_spec("<image>", images=images(b"GIF89a" + FIRST)), "spec.images[0].data", "is not a PNG, JPEG or WebP image"),
    (text_spec("<image>" * 2, images=images(FIRST, bomb())), "spec.images[1].data", "pixels, at most"),
    (text_spec("<image>", images=images(blank(4097, 4096))), "spec.images[0].data", "at most"),
    (text_spec("<image>", images=images(b"")), "spec.images[0].data", "is empty"),
    (text_spec("<image>" * 17, images=images(*[FIRST] * 17)), "spec.images[16]", "is one image too many"),
    (text_spec("<image>" * 3, images=images(*[NOISE] * 3)), "spec.images[2].data", "at most 8388608"),
    (text_spec("<image>", images=images(FIRST, SECOND)), "spec.text", "has 1 image placeholders (token 4096)"),
    (text_spec("no place", images=images(FIRST)), "spec.text", "has 0 image placeholders"),
    (text_spec("an <image> is missing"), "spec.text", "but the request has 0 images"),
    (pb.GenerationSpec(token_ids=pb.TokenIds(ids=[5]), images=images(FIRST)), "spec.token_ids", "has 0 image"),
    (chat("see", FIRST[:-30]), "spec.chat.messages[0].parts[1].image.data", "is broken or truncated"),
    (chat("see", b""), "spec.chat.messages[0].parts[1].image.data", "is empty"),
    (chat("<image>", FIRST), "spec.chat", "has 2 image placeholders"),
    (chat(*["a"] * 257), "spec.chat.messages[0].parts", "257"),
    (
        pb.GenerationSpec(chat=pb.ChatPrompt(messages=[{"role": "user", "parts": [{}]}])),
        "spec.chat.messages[0].parts[0]",
        "is unset: set text or image",
    ),
    (
        pb.GenerationSpec(chat=pb.ChatPrompt(messages=[{"role": "user", "content": "a", "parts": [{"text": "b"}]}])),
        "spec.chat.messages[0].parts",
        "cannot be combined with content",
    ),
    (
        pb.GenerationSpec(chat=pb.ChatPrompt(messages=[{"role": "user", "content": "a"}]), images=images(FIRST)),
        "spec.images",
        "images of a chat are parts of its messages",
    ),
    (chat("a", FIRST, continue_final_message=True), "spec.chat.continue_final_message", "does not end with text"),
    (
        text_spec("<image>", images=images(FIRST), truncate_prompt_tokens=4),
        "spec.truncate_prompt_tokens",
        "cannot be combined with images",
    ),
    (
        text_spec("<image>", images=images(FIRST), output=pb.OutputOptions(prompt_logprobs=0)),
        "spec.output.prompt_logprobs",
        "have no probability",
    ),
    (
        text_spec("<image>" * 16 + "a " * 2000, images=images(*[FIRST] * 16)),
        "spec.text",
        "which leaves no room in the context",
    ),
]


@pytest.mark.parametrize(("spec", "field", "reason"), REFUSED, ids=[f"{field}-{why}" for _, field, why in REFUSED])
async def test_invalid_images_are_refused(client, ring, spec, field, reason):
    assert MAX_IMAGES == 16
    assert 2 * len(NOISE) < MAX_IMAGE_BYTES < 3 * len(NOISE)
    details = await refused(client.events(spec))
    descriptions = {violation.field: violation.description for violation in details.bad.field_violations}
    assert reason in descriptions[field]
    assert details.error.code().name in ("INVALID_ARGUMENT", "OUT_OF_RANGE")
    assert not ring.calls


async def test_a_model_without_vision_refuses_images(ring, start):
    ring.add_engine()
    ring.add_detokenizer()
    client = await start()
    for spec, field in (
        (text_spec("a", images=images(FIRST)), "spec.images[0]"),
        (chat("a", FIRST), "spec.chat.messages[0].parts[1].image"),
    ):
        details = await refused(client.events(spec))
        violation = details.bad.field_violations[0]
        assert violation.field == field
        assert "does not support images" in violation.description
    # Parts that are all text work with any model.
    await client.generate(chat("a", "b"))


async def test_the_images_of_open_requests_are_bounded(client, ring):
    client.router.ring.requests._own_bytes = SharedSpace(2 * (len(FIRST) + len(SECOND) - 1))
    ring.script = script = Script(midway)
    task = asyncio.ensure_future(client.events(text_spec("<image>", images=images(FIRST), output=IDS)))
    await asyncio.wait_for(script.reached.wait(), 60)
    details = await refused(client.events(text_spec("<image>", images=images(SECOND))))
    assert details.info.reason == "OVERLOADED"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
