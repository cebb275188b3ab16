from typing import Any

import msgspec
import pytest

from engine_worker.keeper.messages import (
    ANSWER_BYTES,
    MAX_BLOCK_BYTES,
    MAX_FIND,
    MAX_NAME,
    MAX_QUESTION_BYTES,
    MAX_READ,
    DropBlocks,
    FindBlocks,
    LayoutForm,
    Question,
    ReadBlocks,
    blocks_per_answer,
    body_of,
    encode,
    form_of,
)
from engine_worker.pool_files.layout import Layout
from tests.engine_worker.pool_files.files import LAYOUT, digest

FORM = form_of(LAYOUT)


def decoded(frame: bytes) -> Question:
    question: Question = msgspec.msgpack.decode(body_of(frame), type=Question)
    return question


@pytest.mark.parametrize(
    "question", [FindBlocks(1, FORM, [digest(1)]), ReadBlocks(2, FORM, [digest(2), digest(3)]), DropBlocks(3)]
)
def test_questions_arrive_as_they_were_sent(question: Question) -> None:
    assert decoded(encode(question)) == question
    assert FORM.layout == LAYOUT


@pytest.mark.parametrize(
    "question",
    [
        FindBlocks(1, FORM, [b"short"]),
        FindBlocks(1, FORM, [bytes(17)]),
        FindBlocks(1, FORM, [bytes(16)] * (MAX_FIND + 1)),
        ReadBlocks(1, FORM, [bytes(16)] * (MAX_READ + 1)),
        DropBlocks(-1),
        *(
            ReadBlocks(1, LayoutForm(*fields), [])
            for fields in (
                ("n", 16, (), False),
                ("n", 16, (0,), False),
                ("n", 16, (1,) * 4097, False),
                ("n", 16, (1,), 7),
            )
        ),
    ],
)
def test_what_is_out_of_bounds_is_refused(question: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        decoded(encode(question))


def test_a_block_that_is_too_large_is_refused() -> None:
    with pytest.raises(ValueError, match=f"at most {MAX_BLOCK_BYTES} bytes"):
        form_of(Layout("large", 16, (MAX_BLOCK_BYTES, 1)))
    body = msgspec.msgpack.encode(["DropBlocks", 1])
    assert decoded(encode(DropBlocks(1))[:4] + body) == DropBlocks(1)
    with pytest.raises(msgspec.ValidationError, match="parts"):
        msgspec.msgpack.decode(
            msgspec.msgpack.encode(["ReadBlocks", 1, ["large", 16, [MAX_BLOCK_BYTES, 1], False], []]), type=Question
        )


@pytest.mark.parametrize("tokens", [-1, 0, 1025])
def test_a_block_of_too_few_or_too_many_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(ValueError, match="tokens_per_block: must be 1 to 1024"):
        form_of(LAYOUT._replace(tokens_per_block=tokens))
    question = msgspec.msgpack.encode(["ReadBlocks", 1, ["name", tokens, [1], False], []])
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(question, type=Question)


def test_a_frame_of_another_version_is_refused() -> None:
    with pytest.raises(ValueError, match="not a frame of this version"):
        body_of(b"SK\xff\xff" + encode(DropBlocks(1))[4:])
    with pytest.raises(ValueError, match="not a frame of this version"):
        body_of(b"")


def test_the_layout_of_a_model_with_many_layers_is_accepted() -> None:
    """Its name lists the tensors of all layers."""
    name = f"openvino 2026.4.1 {[([8, 32, 128], 'f32')] * 2 * 128}"
    question = FindBlocks(1, LayoutForm(name, 32, (131_072,) * 256, False), [bytes(16)])
    assert msgspec.msgpack.decode(body_of(encode(question)), type=Question) == question
    with pytest.raises(ValueError, match="a layout's name must have at most"):
        LayoutForm("x" * (MAX_NAME + 1), 32, (1,), False)


def test_the_largest_question_is_accepted() -> None:
    form = LayoutForm("ü" * MAX_NAME, 1024, (MAX_BLOCK_BYTES // 4096,) * 4096, True)
    assert len(encode(FindBlocks((1 << 64) - 1, form, [bytes(16)] * MAX_FIND))) < MAX_QUESTION_BYTES


@pytest.mark.parametrize(
    ("size", "count"), [(1, MAX_READ), (1 << 20, 8), (ANSWER_BYTES - 1, 1), (ANSWER_BYTES + 1, 1), (40 << 20, 1)]
)
def test_an_answer_has_at_least_one_block(size: int, count: int) -> None:
    assert blocks_per_answer(Layout("", 16, (size,))) == count
