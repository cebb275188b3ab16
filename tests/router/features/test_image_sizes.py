"""Images of a model where the number of rows depends on the size, which the router reads from the headers."""

from io import BytesIO

import PIL.Image
import pytest

from router.text.tokenizer_pool import TokenizerPool
from sluice.checkpoint.folder import open_checkpoint
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb
from sluice.wire.tables import Image, PromptTables
from tests.fakes.llava import picture
from tests.fakes.qwen_vl import IMAGE, write_files
from tests.router.conftest import refused, text_spec

WIDE, TALL = picture(1, (70, 20)), picture(2, (20, 60))
WIDE_IMAGE, TALL_IMAGE = Image.of(18, WIDE, 9), Image.of(16, TALL, 2)


def images(*data: bytes) -> list[pb.Image]:
    return [pb.Image(data=image) for image in data]


@pytest.fixture(scope="module")
def qwen_vl(tmp_path_factory):
    return open_checkpoint(str(write_files(tmp_path_factory.mktemp("qwen_vl"))), "qwen-vl")


@pytest.fixture
async def client(ring, start, qwen_vl):
    ring.add_engine().image_rows = qwen_vl.vision.rows
    ring.add_detokenizer()
    return await start(checkpoint=qwen_vl)


async def ids_of(client, text: str) -> list[int]:
    response = await client.generation.Tokenize(pb.TokenizeRequest(text=text, add_special_tokens=False))
    return list(response.token_ids)


async def test_each_image_has_the_number_of_rows_for_its_size(client, ring, qwen_vl):
    text = f"see {IMAGE} and {IMAGE}"
    spec = text_spec(text, images=images(WIDE, TALL), add_special_tokens=False)
    response = await client.generate(spec)
    (call,) = ring.calls
    rows = iter((range(qwen_vl.vocab_size, first := qwen_vl.vocab_size + 18), range(first, first + 16)))
    expected: list[int] = []
    for token in await ids_of(client, text):
        expected += next(rows) if token == qwen_vl.vision.token_id else [token]
    assert call.submit.prompt == expected
    assert call.submit.extras.tables == PromptTables(images=(WIDE_IMAGE, TALL_IMAGE))
    assert response.usage.prompt_tokens == len(expected)


async def test_the_template_keeps_images_in_place(client, ring, qwen_vl):
    parts = [pb.ContentPart(text="a"), pb.ContentPart(image=pb.Image(data=TALL)), pb.ContentPart(text="b")]
    await client.generate(pb.GenerationSpec(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=parts)])))
    (call,) = ring.calls
    expected: list[int] = []
    for token in await ids_of(client, f"user: a{IMAGE}b\nassistant:"):
        is_image = token == qwen_vl.vision.token_id
        expected += range(qwen_vl.vocab_size, qwen_vl.vocab_size + 16) if is_image else [token]
    assert call.submit.prompt == expected
    assert call.submit.extras.tables.images == (TALL_IMAGE,)


async def test_images_are_decoded_one_by_one_so_that_others_have_turns_in_between(client, monkeypatch):
    sizes = []
    compute = TokenizerPool.compute

    async def recorded(pool, size, work, tenant=""):
        sizes.append((size, tenant))
        return await compute(pool, size, work, tenant)

    monkeypatch.setattr(TokenizerPool, "compute", recorded)
    spec = text_spec(IMAGE * 2, images=images(WIDE, TALL))
    await client.generate(spec, metadata=(("x-sluice-tenant", "a"),))
    assert sizes == [(0, "a"), (len(WIDE), "a"), (len(TALL), "a")]


async def test_a_prompt_without_images_needs_no_thread(client, monkeypatch):
    monkeypatch.delattr(TokenizerPool, "compute")
    await client.generate(text_spec("a text"))


async def test_the_model_info_has_the_maximum_number_of_rows(client, qwen_vl):
    (model,) = (await client.models.ListModels(admin_pb2.ListModelsRequest())).models
    assert model.image_tokens == qwen_vl.vision.rows == 30
    assert "images" in model.capabilities


def blank(width: int, height: int) -> bytes:
    file = BytesIO()
    PIL.Image.new("L", (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("spec", "field", "reason"),
    [
        (text_spec(IMAGE, images=images(blank(201, 1))), "spec.images[0].data", "at most 200 times as long"),
        (text_spec(IMAGE, images=images(blank(4097, 4096))), "spec.images[0].data", "pixels, at most"),
        (text_spec(IMAGE * 2, images=images(WIDE, b"GIF89a")), "spec.images[1].data", "is not a PNG, JPEG or WebP"),
        (text_spec(IMAGE, images=images(WIDE[:-30])), "spec.images[0].data", "is broken or truncated"),
        (text_spec(IMAGE, images=images(WIDE, TALL)), "spec.text", "has 1 image placeholders"),
        (text_spec(f"an {IMAGE} is missing"), "spec.text", "but the request has 0 images"),
        (text_spec(IMAGE + "a " * 2040, images=images(WIDE)), "spec.text", "leaves no room in the context"),
    ],
    ids=str,
)
async def test_invalid_images_are_refused(client, ring, spec, field, reason):
    details = await refused(client.events(spec))
    descriptions = {violation.field: violation.description for violation in details.bad.field_violations}
    assert reason in descriptions[field]
    assert details.error.code().name in ("INVALID_ARGUMENT", "OUT_OF_RANGE")
    assert not ring.calls
