"""Encoding and decoding does not change commands."""

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_worker.parallel.commands import CallMethod, ComputeStep, Heartbeat, LoadModel, Shutdown, decode, encode
from engine_worker.parallel.leader import without_rows
from engine_worker.runner.batch import StepArrays, build_arrays
from engine_worker.runner.config import RunnerConfig
from engine_worker.step import Draw, Kept, Move, MoveKind, Slice
from sluice.settings.engine import ProcessorNames
from sluice.wire.calls import MethodCall
from sluice.wire.params import SamplingParams
from sluice.wire.tables import PromptTables, VirtualTokens
from tests.examples import examples
from tests.fakes.tables import random_table

SLICES = st.lists(
    st.builds(
        lambda tokens, start, draws, follows, kept: Slice(
            tokens,
            start,
            list(range(start // 4, start // 4 + 40)),
            tuple(Draw(SamplingParams(), i, 0) for i in range(draws)),
            follows,
            kept=() if kept is None else (Kept(0, 1, (kept,), True),),
        ),
        st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9),
        st.integers(0, 50),
        st.integers(0, 2),
        st.none() | st.integers(0, 3),
        st.sampled_from([None, "logits", "layers.1"]),
    ),
    min_size=1,
    max_size=8,
)
MOVES = st.lists(st.builds(Move, st.sampled_from(MoveKind), st.integers(0, 99), st.integers(0, 99)))


def same(decoded: StepArrays, expected: StepArrays) -> bool:
    for name in StepArrays.__slots__:
        value, expected_value = getattr(decoded, name), getattr(expected, name)
        if isinstance(expected_value, np.ndarray):
            assert value.dtype == expected_value.dtype
            assert value.shape == expected_value.shape
            assert value.flags.writeable
            assert (value == expected_value).all()
        else:
            assert value == expected_value
    return True


@examples(40)
@given(slices=SLICES, moves=MOVES)
def test_a_step(slices, moves):
    arrays = build_arrays(slices, 4, None)
    decoded = decode(bytearray(encode(ComputeStep(tuple(moves), arrays))))
    assert isinstance(decoded, ComputeStep)
    assert decoded.moves == tuple(moves)
    assert same(decoded.arrays, arrays)


def test_rows_of_tables_are_not_sent_with_the_step():
    """Rows may be too large for the channel, so rank 0 broadcasts them."""
    virtual = VirtualTokens.of(9, PromptTables((random_table(3, 4, seed=1),)))
    arrays = build_arrays([Slice([9, 1, 11], 0, [0], virtual=virtual)], 4, None)
    assert arrays.virtual_rows.shape == (2, 4)
    decoded = decode(bytearray(encode(ComputeStep((), without_rows(arrays))))).arrays
    assert decoded.virtual_tokens.tolist() == [0, 2]
    assert decoded.virtual_rows is None


def test_all_other_commands():
    config = RunnerConfig("cpu", max_attention_window=(3, 4), kv_memory_fraction=0.5)
    for command in (
        LoadModel("m", "f", config, "h:1", 2.0, 3.0),
        LoadModel("m", "f", config, None, 2.0, 3.0),
        LoadModel("m", "f", config, None, 2.0, 3.0, "v2", ProcessorNames({"a": "b:c"}, "d:e", True)),
        CallMethod(3, MethodCall("m", '["é"]', "{}", (0, 2))),
        Heartbeat(),
        Shutdown(),
    ):
        assert decode(bytearray(encode(command))) == command
    assert decode(bytearray(encode(ComputeStep((), None)))) == ComputeStep((), None)


@pytest.mark.parametrize("message", [b"", b"\x00", b"\x91\xa3Nil", b"garbage", encode(Heartbeat())[:-1]])
def test_invalid_messages(message):
    with pytest.raises(msgspec.DecodeError):
        decode(bytearray(message))


def test_arrays_of_unsupported_types():
    message = msgspec.msgpack.decode(encode(ComputeStep((), build_arrays([Slice([1], 0, [0])], 4, None))))
    message[2]["token_ids"] = ["|O", [1], b"12345678"]
    with pytest.raises(msgspec.ValidationError):
        decode(bytearray(msgspec.msgpack.encode(message)))
