import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from sluice import tiny_model

# Not from the standard library, so not in the training data.
SNIPPET = '''\
class Inventory:
    def __init__(self, items=None):
        self.items = items or {}

    def add(self, name, count=1):
        """Add count items of the given name."""
        if count < 0:
            raise ValueError("count must not be negative")
        self.items[name] = self.items.get(name, 0) + count
        return self.items[name]

    def __len__(self):
        return sum(self.items.values())
'''


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model.path())


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32)


def test_size() -> None:
    assert sum(file.stat().st_size for file in tiny_model.path().iterdir()) <= 12_000_000


def test_config(tokenizer: PreTrainedTokenizerBase) -> None:
    config = AutoConfig.from_pretrained(tiny_model.path())
    assert config.architectures == ["Qwen3ForCausalLM"]
    assert config.vocab_size == len(tokenizer)
    assert config.tie_word_embeddings


def test_weights_match_the_architecture(model: torch.nn.Module) -> None:
    weights = load_file(tiny_model.path() / "model.safetensors")
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    assert dtypes.keys() == model.state_dict().keys() - {"lm_head.weight"}
    assert set(dtypes.values()) == {torch.bfloat16}


def test_generation_stops_at_either_end(tokenizer: PreTrainedTokenizerBase) -> None:
    generation = GenerationConfig.from_pretrained(tiny_model.path())
    assert tokenizer.convert_ids_to_tokens(generation.eos_token_id) == ["<|im_end|>", "<|endoftext|>"]


@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_round_trips(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_code_and_emoji_round_trip(tokenizer: PreTrainedTokenizerBase) -> None:
    text = "def f(x):\r\n\treturn x  # 👩‍🚀 é e\u0301 Ω 中\x00\n\n\n        'don't'"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token(tokenizer: PreTrainedTokenizerBase) -> None:
    assert set(ByteLevel.alphabet()) <= tokenizer.get_vocab().keys()


def test_markers_are_single_tokens(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer.encode("<|im_start|><|im_end|><|endoftext|>")) == 3
    assert tokenizer.decode(tokenizer.encode("<|im_start|>x<|im_end|>"), skip_special_tokens=True) == "x"


def test_chat_template(tokenizer: PreTrainedTokenizerBase) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi "}]},
        {"role": "assistant", "content": "def "},
    ]
    opened = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi <|im_end|>\n<|im_start|>assistant\n"
    prompt = tokenizer.apply_chat_template(messages[:2], tokenize=False, add_generation_prompt=True)
    continued = tokenizer.apply_chat_template(messages, tokenize=False, continue_final_message=True)
    assert prompt == opened
    assert continued.rstrip() == opened + "def"
    assert tokenizer.apply_chat_template(messages, tokenize=False) == opened + "def <|im_end|>\n"


def test_chat_template_rejects_an_unknown_role(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(Exception, match="role must be"):
        tokenizer.apply_chat_template([{"role": "wizard", "content": "x"}], tokenize=False)


def test_the_loss_on_unseen_python_is_low(tokenizer: PreTrainedTokenizerBase, model: torch.nn.Module) -> None:
    ids = tokenizer(SNIPPET, return_tensors="pt").input_ids
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert loss < 0.5 * math.log(model.config.vocab_size)


def test_training_json_describes_this_model(model: torch.nn.Module) -> None:
    record = json.loads((tiny_model.path() / "training.json").read_text())
    assert record["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert record["held_out_loss"] < 0.5 * math.log(model.config.vocab_size)
