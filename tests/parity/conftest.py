import ast
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sluice import tiny_model


def small_llama(folder: Path) -> Path:
    """A random Llama with the tiny model's tokenizer, grouped-query attention, untied head and llama3 rope scaling."""
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json")).get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 512,
        },
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((tiny_model.path() / name).read_bytes())
    return folder


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of bookkeeping, marked `one_model`, run on one model; what it computes is compared on both.

    `one_quick_model`: other tests compare the same on both models, so the second one is left to `make test-long`.
    """
    if "model_folder" in metafunc.fixturenames:
        models = ["qwen3", "llama"]
        if metafunc.definition.get_closest_marker("one_model"):
            models = ["qwen3"]
        elif metafunc.definition.get_closest_marker("one_quick_model"):
            models = ["qwen3", pytest.param("llama", marks=pytest.mark.long)]
        metafunc.parametrize("model_folder", models, indirect=True, scope="session")


@pytest.fixture(scope="session")
def model_folder(request, tmp_path_factory) -> Path:
    return tiny_model.path() if request.param == "qwen3" else small_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """50 pieces of Python code of 1 to 900 tokens, no two of which begin alike."""
    tokenizer = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json"))
    ids = tokenizer.encode(Path(ast.__file__).read_text() + Path(random.__file__).read_text()).ids
    lengths = [1, 2, 15, 16, 17, 900, *(1 + 899 * i // 43 for i in range(44))]
    return [ids[311 * i : 311 * i + length] for i, length in enumerate(lengths)]


@torch.inference_mode()
def greedy(model: torch.nn.Module, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The greedy outputs of transformers, one prompt at a time."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        tokens = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False)
        outputs.append(tokens[0, len(prompt) :].tolist())
    return outputs


def greedy_oracle(folder: Path, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """`greedy` for the checkpoint in a folder, without an EOS token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return greedy(model, prompts, max_tokens)
