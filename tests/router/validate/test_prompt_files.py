"""Files of prompt adapters: which are refused, and that mutated ones are read or refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import RequestError
from router.validate.prompt_files import PromptFiles, read_rows
from tests.examples import examples
from tests.fakes.prompt_files import config_of, some_rows, weights_of

A = some_rows(0)

BAD_FILES = {
    "another kind": (
        config_of(A, peft_type="PREFIX_TUNING"),
        weights_of(A),
        "must be PROMPT_TUNING, not 'PREFIX_TUNING'",
    ),
    "lora": (config_of(A, peft_type="LORA"), weights_of(A), "not 'LORA'"),
    "no kind": (b"{}", weights_of(A), "not None"),
    "not json": (b"\x80\x05", weights_of(A), "not a JSON object"),
    "not text": (b'{"\xff": 1}', weights_of(A), "not a JSON object"),
    "deep json": (b"[" * 100_000, weights_of(A), "not a JSON object"),
    "an unknown option": (config_of(A, magic=3), weights_of(A), "'magic' = 3 is not supported"),
    "an encoder": (config_of(A, num_transformer_submodules=2), weights_of(A), "num_transformer_submodules"),
    "modules": (config_of(A, modules_to_save=["lm_head"]), weights_of(A), "modules_to_save"),
    "another count": (config_of(A, num_virtual_tokens=4), weights_of(A), "has the shape [3, 2]"),
    "another width": (config_of(A, token_dim=3), weights_of(A), "has the shape [3, 2]"),
    "one dimension": (config_of(A), weights_of(A.reshape(-1)), "has the shape [6]"),
    "another tensor": (config_of(A), weights_of(A, "lora_A.weight"), "must have prompt_embeddings alone"),
    "double": (config_of(A), weights_of(A.astype(np.float64)), "type 'F64'"),
    "a pickle": (config_of(A), b"\x80\x02}q\x00." + bytes(100), "not a safetensors file"),
    "a long header": (config_of(A), (1 << 62).to_bytes(8, "little") + bytes(100), "not a safetensors file"),
    "empty": (config_of(A), b"", "not a safetensors file"),
    "cut short": (config_of(A), weights_of(A)[:-4], "its header says (0, 24)"),
    "too large": (config_of(A), bytes(9 << 20), "are read"),
}


@pytest.mark.parametrize(("config", "weights", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files(config, weights, expected):
    with pytest.raises(RequestError) as error:
        read_rows("files", PromptFiles(config, weights))
    assert [violation.field for violation in error.value.violations] == ["files"]
    assert expected in error.value.violations[0].description


@examples(200)
@given(st.data())
def test_mutated_files_are_rows_or_refused(data):
    config, weights = bytearray(config_of(A)), bytearray(weights_of(A))
    for target in (config, weights):
        for _ in range(data.draw(st.integers(0, 3))):
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    try:
        rows = read_rows("files", PromptFiles(bytes(config), bytes(weights)))
    except RequestError:
        return
    assert len(rows.shape) == 2
