"""Prompts with images: outputs equal those of transformers' Qwen2-VL and Qwen2.5-VL, for any batching and chunking."""

import pytest
from safetensors.torch import load_file, save_file

from engine_worker.positions import Positions
from sluice.checkpoint.folder import open_checkpoint
from sluice.checkpoint.vision import Grid
from sluice.pictures import upright_size
from sluice.wire.tables import Image, PromptTables
from tests.fakes.llava import picture
from tests.fakes.qwen_vl import ARCHITECTURES, SCALING, write_qwen_vl
from tests.parity.harness import EngineHarness
from tests.parity.qwen_vl_oracle import Oracle
from tests.parity.vision import (
    GREEDY,
    STOPPING,
    Prompt,
    check_beams,
    check_chunks,
    check_draft_tokens,
    check_preemptions,
    check_resume,
    check_two_ranks,
    refused,
    tokens_of,
)

pytestmark = pytest.mark.timeout(600)
WIDE, TALL, SQUARE = (70, 20), (20, 60), (40, 40)


@pytest.fixture(scope="module")
def oracles(tmp_path_factory) -> dict[str, Oracle]:
    return {kind: Oracle(write_qwen_vl(tmp_path_factory.mktemp(kind), kind)) for kind in ARCHITECTURES}


@pytest.fixture(scope="module")
def oracle(oracles) -> Oracle:
    return oracles["qwen2_vl"]


def image_of(data: bytes) -> Image:
    grid = SCALING.grid(*upright_size(data))
    return Image.of(grid.rows, data, grid.columns)


def as_sent(oracle: Oracle, prompt: Prompt) -> tuple[list[int], PromptTables]:
    """The prompt in the form in which a router sends it: virtual tokens in place of images."""
    ids: list[int] = []
    images: list[Image] = []
    first = oracle.vocab_size
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
        else:
            images.append(image_of(part))
            ids += [oracle.start, *range(first, first := first + images[-1].rows), oracle.end]
    return ids, PromptTables(images=tuple(images))


def submit(harness: EngineHarness, oracle: Oracle, prompt: Prompt, **options) -> int:
    ids, tables = as_sent(oracle, prompt)
    return harness.send(ids, **({"sampling": GREEDY, "stopping": STOPPING} | options), tables=tables)


def mixed(prompts: list[list[int]], size: int, seed: int = 0) -> Prompt:
    """A prompt with images of several shapes at its start, within, and at its end."""
    text = prompts[12][:size]
    first, second = picture(2 * seed, WIDE), picture(2 * seed + 1, TALL)
    return [first, *text[: size // 2], second, *text[size // 2 :], first]


@pytest.mark.parametrize(("kind", "backend"), [*((kind, "torch") for kind in ARCHITECTURES), ("qwen2_vl", "openvino")])
def test_images_of_all_shapes_share_a_batch_with_text(prompts, oracles, kind, backend):
    oracle = oracles[kind]
    with_images = [
        [picture(1, SQUARE), *prompts[11][:40]],
        [picture(2, (300, 20), "JPEG")],
        [5, picture(3, (20, 300), "WEBP"), 6],
        [*prompts[11][:9], picture(4, (9, 8)), *prompts[11][9:30]],
        [picture(5, WIDE), picture(6, (500, 400))],
        mixed(prompts, 30),
        [*prompts[11][:40]],
    ]
    harness = EngineHarness(oracle.folder, backend=backend)
    numbers = [submit(harness, oracle, prompt) for prompt in with_images]
    harness.run()
    outputs = [harness.stream(number).tokens for number in numbers]
    assert outputs == [oracle.generate(prompt) for prompt in with_images]
    assert len({tuple(tokens) for tokens in outputs}) == len(with_images)


def test_outputs_depend_on_the_image_and_on_positions(prompts, oracle, monkeypatch):
    """The other tests prove little unless this is so."""
    with_images = [[*prompts[11][:5], picture(seed, WIDE), *prompts[11][5:10]] for seed in range(6)]
    expected = [oracle.generate(prompt) for prompt in with_images]
    assert len(set(map(tuple, expected))) > 3
    monkeypatch.setattr(Positions, "of", staticmethod(lambda *_: None))
    harness = EngineHarness(oracle.folder)
    numbers = [submit(harness, oracle, prompt) for prompt in with_images]
    harness.run()
    assert sum(harness.stream(number).tokens != tokens for number, tokens in zip(numbers, expected, strict=True)) > 3


def newer(name: str) -> str:
    """The tensor's name in the modules of transformers."""
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    return name if name.startswith("lm_head") else "model." + name


def test_newer_tensor_names_and_tied_embeddings_are_accepted(tmp_path, prompts):
    oracle = Oracle(write_qwen_vl(tmp_path, "qwen2_5_vl", tied=True))
    file = tmp_path / "model.safetensors"
    save_file({newer(name): tensor for name, tensor in load_file(file).items()}, file)
    harness, prompt = EngineHarness(tmp_path), mixed(prompts, 10)
    assert tokens_of(harness, submit(harness, oracle, prompt)) == oracle.generate(prompt)


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.long), True])
def test_chunks_may_end_anywhere_in_an_image(prompts, oracle, overlap):
    chunks = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 19, 20, 21, 22, 23, 31, 37, 38, 39, 45)
    check_chunks(submit, oracle, mixed(prompts, 6)[:-1], chunks, overlap=overlap)


@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_prefixes_are_shared_up_to_the_first_image_that_differs(prompts, oracle, backend):
    """Images differ by their data, also if they have the same number of rows in another grid."""
    text, tail = prompts[14][:64], prompts[15][:40]
    wide, tall, other_wide = picture(4, (64, 16)), picture(4, (16, 64)), picture(5, (64, 16))
    assert SCALING.grid(64, 16) == Grid(2, 8)
    assert SCALING.grid(16, 64) == Grid(8, 2)
    harness = EngineHarness(oracle.folder, backend=backend)
    # 64 tokens of text, 18 of the image and 40 of text, in blocks of 16 or 32 tokens.
    complete = 112 if backend == "torch" else 96
    for image, cached in (
        (wide, 0),
        (tall, 64),
        (other_wide, 64),
        (wide, complete),
        (tall, complete),
        (other_wide, complete),
    ):
        prompt = [*text, image, *tail]
        number = submit(harness, oracle, prompt)
        assert tokens_of(harness, number) == oracle.generate(prompt)
        assert harness.cached_tokens(number) == cached


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"backend": "openvino"}], ids=str)
def test_preemptions_change_no_token(prompts, oracle, options):
    with_images = [mixed(prompts, 20 + 9 * i, i) for i in range(5)]
    check_preemptions(submit, oracle, with_images, 90, kv_cache_tokens=320, **options)


@pytest.mark.quick(1)
@pytest.mark.parametrize("backend", ["torch", "openvino"])
def test_requests_with_several_outputs_can_resume(prompts, oracle, backend):
    check_resume(submit, oracle, mixed(prompts, 20), backend)


def test_beam_search_equals_transformers(prompts, oracle):
    check_beams(submit, oracle, mixed(prompts, 20))


@pytest.mark.parametrize("overlap", [False, True])
def test_draft_tokens_change_no_token(prompts, oracle, overlap):
    line = prompts[16][:9]
    prompt = [*line, picture(7, WIDE), *line, picture(7, TALL), *line]
    check_draft_tokens(submit, oracle, prompt, overlap=overlap)


@pytest.mark.long
def test_two_ranks_return_the_same_tokens(prompts, oracle):
    check_two_ranks(submit, oracle, mixed(prompts, 20))


def test_malformed_images_are_refused(prompts, oracle):
    harness = EngineHarness(oracle.folder)
    data = picture(1, WIDE)
    ids, tables = as_sent(oracle, [5, data, 6])
    assert open_checkpoint(str(oracle.folder)).vision.rows == 30
    assert "must be consecutive" in refused(harness, ids[:-3], tables)
    assert "must be consecutive" in refused(harness, ids[::-1], tables)
    (image,) = tables.images
    turned = Image.of(image.rows, data, image.rows // image.columns)
    for wrong in (turned, Image.of(30, data), Image.of(image.rows + image.columns, data, image.columns)):
        rows = range(oracle.vocab_size, oracle.vocab_size + wrong.rows)
        assert "by its size, not" in refused(harness, [5, *rows, 6], PromptTables(images=(wrong,)))
    assert tokens_of(harness, submit(harness, oracle, [5, data, 6])) == oracle.generate([5, data, 6])
