"""Prompts with images: outputs equal those of transformers' LLaVA, for any batching and chunking."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sluice.checkpoint.errors import CheckpointError
from sluice.wire.tables import Image, PromptTables
from tests.fakes.llava import ROWS, picture, write_llava
from tests.fakes.tables import table_of
from tests.parity.harness import EngineHarness
from tests.parity.llava_oracle import Oracle
from tests.parity.vision import (
    GREEDY,
    MAX_TOKENS,
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
BACKENDS = ["torch", "openvino"]


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle(write_llava(tmp_path_factory.mktemp("llava")))


def submit(harness: EngineHarness, oracle: Oracle, prompt: Prompt, **options) -> int:
    """Send a request, with virtual tokens in place of its images. Returns its number."""
    ids: list[int] = []
    images = [part for part in prompt if isinstance(part, bytes)]
    first = oracle.vocab_size
    for part in prompt:
        if isinstance(part, int):
            ids.append(part)
        else:
            ids += range(first, first := first + oracle.rows)
    tables = PromptTables(images=tuple(Image.of(oracle.rows, data) for data in images))
    return harness.send(ids, **({"sampling": GREEDY, "stopping": STOPPING} | options), tables=tables)


def mixed(prompts: list[list[int]], size: int, seed: int = 0) -> Prompt:
    """A prompt with images at its start, within, and at its end."""
    text = prompts[12][:size]
    first, second = picture(2 * seed), picture(2 * seed + 1)
    return [first, *text[: size // 2], second, *text[size // 2 :], first]


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_in_every_format_share_a_batch_with_text(prompts, oracle, backend):
    with_images = [
        [picture(1), *prompts[11][:40]],
        [picture(2, (300, 20), "JPEG")],
        [5, picture(3, (20, 300), "WEBP"), 6],
        mixed(prompts, 30),
    ]
    harness = EngineHarness(oracle.folder, backend=backend)
    numbers = [submit(harness, oracle, prompt) for prompt in with_images]
    plain = harness.send(prompts[11][:40], GREEDY, STOPPING)
    harness.run()
    outputs = [harness.stream(number).tokens for number in numbers]
    assert outputs == [oracle.generate(prompt) for prompt in with_images]
    assert len({tuple(tokens) for tokens in outputs}) == len(with_images)
    assert len(harness.stream(plain).tokens) == MAX_TOKENS


def test_outputs_depend_on_the_image(prompts, oracle):
    """The other tests prove little unless this is so."""
    outputs = {tuple(oracle.generate([picture(seed), *prompts[11][:5]])) for seed in range(6)}
    assert len(outputs) > 3


@pytest.mark.parametrize(
    ("kinds", "rows"),
    [
        ({"strategy": "full"}, ROWS + 1),
        ({"tower": "siglip", "strategy": "full", "decoder": "qwen2"}, ROWS),
        ({"decoder": "mistral"}, ROWS),
        ({"decoder": "qwen3"}, ROWS),
    ],
    ids=str,
)
def test_every_vision_tower_and_decoder_equals_transformers(tmp_path, prompts, kinds, rows):
    oracle = Oracle(write_llava(tmp_path, **kinds), rows)
    prompt = mixed(prompts, 10)
    harness = EngineHarness(tmp_path)
    assert tokens_of(harness, submit(harness, oracle, prompt)) == oracle.generate(prompt)


def older(name: str) -> str:
    """The tensor's name in published checkpoints."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def newer(name: str) -> str:
    """The tensor's name in the modules of transformers."""
    short = name.removeprefix("language_model.")
    return short if short.startswith("lm_head") else "model." + name.replace("language_model.model.", "language_model.")


@pytest.mark.parametrize("renamed", [older, newer])
def test_tensor_names_of_other_versions_are_accepted(tmp_path, prompts, oracle, renamed):
    shutil.copytree(oracle.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, file)
    harness, prompt = EngineHarness(tmp_path), mixed(prompts, 10)
    assert tokens_of(harness, submit(harness, oracle, prompt)) == oracle.generate(prompt)


def test_a_checkpoint_without_its_vision_tower_is_refused(tmp_path, oracle):
    shutil.copytree(oracle.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensors[name] for name in tensors if not name.startswith("vision_tower")}, file)
    with pytest.raises(CheckpointError, match="missing: vision_tower"):
        EngineHarness(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot read the image processing of"):
        EngineHarness(tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", [False, True])
def test_chunks_may_end_anywhere_in_an_image(prompts, oracle, overlap):
    chunks = (1, 2, 3, 5, 7, 8, 15, 16, 17, 18, 19, 20, 21, 31, 37, 38, 39)
    check_chunks(submit, oracle, mixed(prompts, 6)[:-1], chunks, overlap=overlap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_images_share_blocks_and_others_do_not(prompts, oracle, backend):
    """Text before the first image that differs is shared too."""
    text, tail = prompts[14][:64], prompts[15][:5]
    harness = EngineHarness(oracle.folder, backend=backend)
    first, second = picture(4), picture(5)
    for images, cached in (
        ((first, first, first, first), 0),
        ((second, first, first, first), 64),
        ((first, first, second, first), 64 + 2 * ROWS),
        ((first, first, first, first), 64 + 4 * ROWS),
        ((second, first, first, first), 64 + 4 * ROWS),
    ):
        prompt = [*text, *images, *tail]
        number = submit(harness, oracle, prompt)
        assert tokens_of(harness, number) == oracle.generate(prompt)
        assert harness.cached_tokens(number) == cached


@pytest.mark.quick(1)
@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"backend": "openvino"}], ids=str)
def test_preemptions_change_no_token(prompts, oracle, options):
    with_images = [mixed(prompts, 20 + 9 * i, i) for i in range(5)]
    check_preemptions(submit, oracle, with_images, 60, kv_cache_tokens=384, **options)


def test_evicted_image_rows_are_computed_again(prompts, oracle):
    """Waiting requests hold no rows, and the cache has room for the rows of one image."""
    harness = EngineHarness(oracle.folder, max_tokens_per_step=24, max_batch_size=2, image_cache_size=1)
    with_images = [mixed(prompts, 20, seed) for seed in range(4)]
    numbers = [submit(harness, oracle, prompt) for prompt in with_images]
    harness.run()
    outputs = [harness.stream(number).tokens for number in numbers]
    assert outputs == [oracle.generate(prompt) for prompt in with_images]


@pytest.mark.parametrize("backend", BACKENDS)
def test_requests_with_several_outputs_can_resume(prompts, oracle, backend):
    check_resume(submit, oracle, mixed(prompts, 20), backend)


def test_beam_search_equals_transformers(prompts, oracle):
    check_beams(submit, oracle, mixed(prompts, 20))


def test_draft_tokens_change_no_token(prompts, oracle):
    line = prompts[16][:9]
    check_draft_tokens(submit, oracle, [*line, picture(7), *line, picture(7), *line])


@pytest.mark.long
def test_two_ranks_return_the_same_tokens(prompts, oracle):
    check_two_ranks(submit, oracle, mixed(prompts, 20))


def test_malformed_images_are_refused(prompts, oracle):
    harness = EngineHarness(oracle.folder)
    first, good = oracle.vocab_size, Image.of(ROWS, picture(1))
    ids = list(range(first, first + ROWS))
    forged = Image(bytes(16), ROWS, good.data)
    assert "does not match its digest" in refused(harness, ids, PromptTables(images=(forged,)))
    assert f"must have {ROWS} rows (got 5)" in refused(harness, ids, PromptTables(images=(Image.of(5, good.data),) * 4))
    broken = PromptTables(images=(good, Image.of(ROWS, picture(2)[:-40])))
    assert "an image is broken or truncated" in refused(harness, ids, broken)
    assert "have no probability" in refused(harness, ids, PromptTables(images=(good,)), prompt_logprobs=0)
    plain = harness.send(prompts[3], GREEDY, STOPPING)
    assert len(tokens_of(harness, plain)) == MAX_TOKENS


def test_a_prompt_may_have_both_tables_and_images(oracle):
    """Ids of table rows come before those of image rows."""
    torch.manual_seed(1)
    rows = torch.randn(2, 64)
    harness, first = EngineHarness(oracle.folder), oracle.vocab_size
    tables = PromptTables((table_of(rows),), images=(Image.of(ROWS, picture(1)),))
    image = range(first + 2, first + 2 + ROWS)
    both = harness.send([first, 5, *image, first + 1, 6], GREEDY, STOPPING, tables=tables)
    without = submit(harness, oracle, [5, picture(1), 6])
    harness.run()
    assert len(harness.stream(both).tokens) == MAX_TOKENS
    assert harness.stream(both).tokens != harness.stream(without).tokens
