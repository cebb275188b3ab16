"""Images in prompts: the tokens of transformers' LLaVA, however the work is cut."""

import shutil
from io import BytesIO

import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoImageProcessor, LlavaForConditionalGeneration

from sluice.ring.checkpoint import CheckpointError
from sluice.ring.images import Image
from sluice.ring.params import Speculation, StopParams
from sluice.ring.tables import PromptTables
from tests.fakes.llava import ROWS, picture, write_llava
from tests.fakes.tables import table_of
from tests.parity.harness import EngineHarness
from tests.parity.vision import (
    GREEDY,
    MAX_TOKENS,
    STOPPING,
    Prompt,
    check_beams,
    check_chunks,
    check_pauses,
    check_resume,
    check_two_ranks,
    refused,
    tokens_of,
)

pytestmark = pytest.mark.timeout(600)
BACKENDS = ["torch", "openvino"]


class Oracle:
    """transformers' model of a folder, which gets the image's token once for each of its rows."""

    def __init__(self, folder, rows: int = ROWS) -> None:
        self.folder = folder
        self.rows = rows
        self.model = LlavaForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None
        self.processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.token_id = self.model.config.image_token_id
        self.vocab_size = self.model.config.text_config.vocab_size

    @torch.inference_mode()
    def generate(self, prompt: Prompt, **options) -> list[int]:
        """`prompt`: ids, and images where they stand."""
        ids = [token for part in prompt for token in ([part] if isinstance(part, int) else [self.token_id] * self.rows)]
        pictures = [PIL.Image.open(BytesIO(part)) for part in prompt if isinstance(part, bytes)]
        pixels = self.processor(images=pictures, return_tensors="pt")["pixel_values"]
        tensor = torch.tensor([ids])
        options = {"max_new_tokens": MAX_TOKENS, "do_sample": False} | options
        found = self.model.generate(tensor, pixel_values=pixels, attention_mask=torch.ones_like(tensor), **options)
        return found[0, len(ids) :].tolist()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory) -> Oracle:
    return Oracle(write_llava(tmp_path_factory.mktemp("llava")))


def ask(harness: EngineHarness, oracle: Oracle, prompt: Prompt, **options) -> int:
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
    """Images at the start, within, and at the end."""
    text = prompts[12][:size]
    first, second = picture(2 * seed), picture(2 * seed + 1)
    return [first, *text[: size // 2], second, *text[size // 2 :], first]


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_of_each_kind_beside_text(prompts, oracle, backend):
    asked = [
        [picture(1), *prompts[11][:40]],
        [picture(2, (300, 20), "JPEG")],
        [5, picture(3, (20, 300), "WEBP"), 6],
        mixed(prompts, 30),
    ]
    harness = EngineHarness(oracle.folder, backend=backend)
    numbers = [ask(harness, oracle, prompt) for prompt in asked]
    plain = harness.send(prompts[11][:40], GREEDY, STOPPING)
    harness.run()
    found = [harness.stream(number).tokens for number in numbers]
    assert found == [oracle.generate(prompt) for prompt in asked]
    assert len({tuple(tokens) for tokens in found}) == len(asked)
    assert len(harness.stream(plain).tokens) == MAX_TOKENS


def test_the_other_image_decides_the_tokens(prompts, oracle):
    """Else the tests here would prove little."""
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
def test_other_towers_and_decoders(tmp_path, prompts, kinds, rows):
    oracle = Oracle(write_llava(tmp_path, **kinds), rows)
    prompt = mixed(prompts, 10)
    harness = EngineHarness(tmp_path)
    assert tokens_of(harness, ask(harness, oracle, prompt)) == oracle.generate(prompt)


def older(name: str) -> str:
    """As in published files."""
    return name.replace("vision_tower.", "vision_tower.vision_model.")


def newer(name: str) -> str:
    """As in transformers' modules."""
    found = name.removeprefix("language_model.")
    return found if found.startswith("lm_head") else "model." + name.replace("language_model.model.", "language_model.")


@pytest.mark.parametrize("renamed", [older, newer])
def test_names_of_other_versions(tmp_path, prompts, oracle, renamed):
    shutil.copytree(oracle.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({renamed(name): tensor for name, tensor in tensors.items()}, file)
    harness, prompt = EngineHarness(tmp_path), mixed(prompts, 10)
    assert tokens_of(harness, ask(harness, oracle, prompt)) == oracle.generate(prompt)


def test_a_checkpoint_without_its_tower(tmp_path, oracle):
    shutil.copytree(oracle.folder, tmp_path, dirs_exist_ok=True)
    file = tmp_path / "model.safetensors"
    save_file({name: each for name, each in load_file(file).items() if not name.startswith("vision_tower")}, file)
    with pytest.raises(CheckpointError, match="missing: vision_tower"):
        EngineHarness(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(CheckpointError, match="cannot read the image processing of"):
        EngineHarness(tmp_path)


@pytest.mark.parametrize("overlap", [False, True])
def test_chunk_edges_everywhere(prompts, oracle, overlap):
    chunks = (1, 2, 3, 5, 7, 8, 15, 16, 17, 18, 19, 20, 21, 31, 37, 38, 39)
    check_chunks(ask, oracle, mixed(prompts, 6)[:-1], chunks, overlap=overlap)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_images_share_blocks_and_others_do_not(prompts, oracle, backend):
    """A text before images is shared in any case."""
    text, tail = prompts[14][:64], prompts[15][:5]
    harness = EngineHarness(oracle.folder, backend=backend)
    one, other = picture(4), picture(5)
    for images, cached in (
        ((one, one, one, one), 0),
        ((other, one, one, one), 64),
        ((one, one, other, one), 64 + 2 * ROWS),
        ((one, one, one, one), 64 + 4 * ROWS),
        ((other, one, one, one), 64 + 4 * ROWS),
    ):
        prompt = [*text, *images, *tail]
        number = ask(harness, oracle, prompt)
        assert tokens_of(harness, number) == oracle.generate(prompt)
        assert harness.cached_tokens(number) == cached


@pytest.mark.parametrize("options", [{}, {"overlap": True}, {"backend": "openvino"}], ids=str)
def test_pauses_and_a_pool_too_small_change_nothing(prompts, oracle, options):
    asked = [mixed(prompts, 20 + 9 * i, i) for i in range(5)]
    check_pauses(ask, oracle, asked, 60, kv_cache_tokens=384, **options)


def test_rows_that_were_dropped_are_computed_again(prompts, oracle):
    """Requests that wait hold no rows: here the cache has room for those of one image."""
    harness = EngineHarness(oracle.folder, max_tokens_per_step=24, max_batch_size=2, image_cache_size=1)
    asked = [mixed(prompts, 20, seed) for seed in range(4)]
    numbers = [ask(harness, oracle, prompt) for prompt in asked]
    harness.run()
    found = [harness.stream(number).tokens for number in numbers]
    assert found == [oracle.generate(prompt) for prompt in asked]


@pytest.mark.parametrize("backend", BACKENDS)
def test_resume_and_several_outputs(prompts, oracle, backend):
    check_resume(ask, oracle, mixed(prompts, 20), backend)


def test_beams(prompts, oracle):
    check_beams(ask, oracle, mixed(prompts, 20))


def test_drafts(prompts, oracle):
    line = prompts[16][:9]
    prompt = [*line, picture(7), *line, picture(7), *line]
    harness = EngineHarness(oracle.folder)
    number = ask(harness, oracle, prompt, stopping=StopParams(40), speculation=Speculation(4))
    assert tokens_of(harness, number) == oracle.generate(prompt, max_new_tokens=40)


def test_two_ranks(prompts, oracle):
    check_two_ranks(ask, oracle, mixed(prompts, 20))


def test_what_does_not_fit_is_refused(prompts, oracle):
    harness = EngineHarness(oracle.folder)
    first, good = oracle.vocab_size, Image.of(ROWS, picture(1))
    ids = list(range(first, first + ROWS))
    forged = Image(bytes(16), ROWS, good.data)
    assert "does not match its digest" in refused(harness, ids, PromptTables(images=(forged,)))
    assert f"must have {ROWS} rows, got 5" in refused(harness, ids, PromptTables(images=(Image.of(5, good.data),) * 4))
    broken = PromptTables(images=(good, Image.of(ROWS, picture(2)[:-40])))
    assert "an image is broken or truncated" in refused(harness, ids, broken)
    assert "have no probability" in refused(harness, ids, PromptTables(images=(good,)), prompt_logprobs=0)
    plain = harness.send(prompts[3], GREEDY, STOPPING)
    assert len(tokens_of(harness, plain)) == MAX_TOKENS


def test_tables_and_images_of_one_prompt(oracle):
    """Rows of tables come first."""
    torch.manual_seed(1)
    rows = torch.randn(2, 64)
    harness, first = EngineHarness(oracle.folder), oracle.vocab_size
    tables = PromptTables((table_of(rows),), images=(Image.of(ROWS, picture(1)),))
    image = range(first + 2, first + 2 + ROWS)
    both = harness.send([first, 5, *image, first + 1, 6], GREEDY, STOPPING, tables=tables)
    without = ask(harness, oracle, [5, picture(1), 6])
    harness.run()
    assert len(harness.stream(both).tokens) == MAX_TOKENS
    assert harness.stream(both).tokens != harness.stream(without).tokens
