"""Inputs for fuzzing: protobufs with extreme values, and bytes that are almost a valid protobuf."""

import random
from typing import Any

from google.protobuf.descriptor import FieldDescriptor as Field
from google.protobuf.message import Message

MAX_DEPTH = 6
TEXTS = ("", "def f(x):", "\0", "\u202e", "\U0001f600" * 50, "a" * 3000, "{{ messages }}", "(" * 500, "[" * 2000)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 3e38, float("nan"), float("inf"), float("-inf"))
RANGES = {
    Field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    Field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    Field.CPPTYPE_UINT32: (0, 2**32 - 1),
    Field.CPPTYPE_UINT64: (0, 2**64 - 1),
    Field.CPPTYPE_ENUM: (0, 2**31 - 1),
}


def fill(message: Message, chance: random.Random, likely: float = 0.3, depth: int = 0) -> None:
    """Set some fields, each with probability `likely`, to values that their type allows."""
    for field in message.DESCRIPTOR.fields:
        if chance.random() > likely or depth > MAX_DEPTH:
            continue
        count = chance.choice((0, 1, 2, 5, 40)) if field.is_repeated else 1
        for _ in range(count):
            _set(message, field, chance, depth)


def mutate(data: bytes, chance: random.Random) -> bytes:
    """A copy with some bytes flipped, removed, repeated or inserted."""
    mutated = bytearray(data)
    for _ in range(chance.randint(1, 8)):
        at, size = chance.randint(0, len(mutated)), chance.randint(1, 16)
        match chance.randint(0, 4):
            case 0 if mutated:
                mutated[at % len(mutated)] ^= 1 << chance.randint(0, 7)
            case 1:
                del mutated[at : at + size]
            case 2:
                mutated[at:at] = mutated[at : at + size]
            case 3:
                mutated[at:at] = chance.randbytes(size)
            case _:
                # A varint of 10 bytes, the longest there is.
                mutated[at:at] = b"\xff" * 9 + b"\x01"
    return bytes(mutated)


def _set(message: Any, field: Field, chance: random.Random, depth: int) -> None:
    options = field.message_type.GetOptions() if field.message_type else None
    if options is not None and options.map_entry:
        entries, key, value = getattr(message, field.name), *field.message_type.fields
        if value.message_type:
            fill(entries[_value(key, chance)], chance, depth=depth + 1)
        else:
            entries[_value(key, chance)] = _value(value, chance)
    elif field.message_type:
        child = getattr(message, field.name)
        fill(child.add() if field.is_repeated else child, chance, depth=depth + 1)
        if not field.is_repeated:
            child.SetInParent()
    elif field.is_repeated:
        getattr(message, field.name).append(_value(field, chance))
    else:
        setattr(message, field.name, _value(field, chance))


def _value(field: Field, chance: random.Random) -> Any:
    kind = field.cpp_type
    if kind == Field.CPPTYPE_STRING:
        text = chance.choice(TEXTS)
        return text.encode() if field.type == Field.TYPE_BYTES else text
    if kind in (Field.CPPTYPE_FLOAT, Field.CPPTYPE_DOUBLE):
        return chance.choice(FLOATS)
    if kind == Field.CPPTYPE_BOOL:
        return chance.random() < 0.5
    low, high = RANGES[kind]
    return chance.choice((low, high, 0, 1, 2, chance.randint(0, 5000)))
