"""A file that people have: SmolLM2 in Q4_1."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from sluice.client import Client
from sluice.gguf.folder import gguf_folder
from sluice.launch import Ring

TOPICS = ("France", "bread", "the moon", "music", "rain", "bees", "gold", "paper", "chess", "salt")
QUESTIONS = (
    "What is {}?",
    "Tell me a short story about {}.",
    "Write three facts about {} as a list.",
    "How would you explain {} to a child?",
    "Translate to French: I like {}.",
)
TEXTS = (
    "Hello, world!",
    "  two  spaces\n\n\tand a tab",
    "don't I'LL",
    "ünï cødé 日本語 🙂",
    "<|im_start|>user\nHi<|im_end|>",
)
TOKENS = 32


@pytest.fixture(scope="module")
def folder(real_gguf, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return gguf_folder(str(real_gguf))


def test_the_tokenizer_is_that_which_transformers_reads_from_the_file(real_gguf, folder):
    ours = AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(real_gguf.parent, gguf_file=real_gguf.name)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text), text
    chat = [{"role": "user", "content": "Hi"}]
    rendered = [each.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for each in (ours, theirs)]
    assert rendered[0] == rendered[1]
    # transformers does not know that this model's tokenizer splits numbers into digits.
    assert ours.tokenize("2024") == ["2", "0", "2", "4"]


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("backend", ["openvino", "torch"])
def test_greedy_answers_are_those_of_transformers(real_gguf, backend):
    """The file's values in float32, and no rounding of activations."""
    dense = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        real_gguf.parent, gguf_file=real_gguf.name, dtype=torch.float32, quantization_config=dense
    )
    chats = [[{"role": "user", "content": question.format(topic)}] for topic in TOPICS for question in QUESTIONS]
    settings = {"backend": backend, "quantized_activations": False, "kv_cache_tokens": 16_384}
    with Ring(real_gguf, detokenizers=1, engine_args=settings) as ring, Client(ring.address) as client:
        different = []
        for chat in chats:
            prompt = list(client.tokenize(chat).token_ids)
            found = client.generate(prompt, max_tokens=TOKENS, temperature=0.0, token_ids=True)
            with torch.inference_mode():
                expected = model.generate(torch.tensor([prompt]), max_new_tokens=TOKENS, do_sample=False)[0]
            if list(found.outputs[0].token_ids) != expected[len(prompt) :].tolist():
                different.append(chat[0]["content"])
    assert not different
