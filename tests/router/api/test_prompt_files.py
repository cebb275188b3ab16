"""Files of prompt adapters: bad files are refused, and mutated files are either read or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.api.prompt_adapters import PromptFiles, read_rows
from router.errors import RequestError
from tests.examples import examples
from tests.fakes.prompt_files import BAD_FILES, config_of, some_rows, weights_of

A = some_rows(0)


@pytest.mark.parametrize(("config", "weights", "expected"), BAD_FILES.values(), ids=BAD_FILES)
def test_bad_files(config, weights, expected):
    with pytest.raises(RequestError) as error:
        read_rows("files", PromptFiles(config, weights))
    assert [violation.field for violation in error.value.violations] == ["files"]
    assert expected in error.value.violations[0].description


@examples(200)
@given(st.data())
def test_mutated_files_are_read_or_refused(data):
    config, weights = bytearray(config_of(A)), bytearray(weights_of(A))
    for target in (config, weights):
        for _ in range(data.draw(st.integers(0, 3))):
            target[data.draw(st.integers(0, len(target) - 1))] = data.draw(st.integers(0, 255))
    try:
        rows = read_rows("files", PromptFiles(bytes(config), bytes(weights)))
    except RequestError:
        return
    assert len(rows.shape) == 2
