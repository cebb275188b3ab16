"""Finds the values that a field of a body may have, for error texts."""

import re
from collections.abc import Iterable, Iterator

import msgspec
from msgspec.inspect import ListType, LiteralType, StructType, Type, UnionType, type_info

NAME = re.compile(r"\w+(?=[.\[]|$)")
"""The name of a field in a place such as `messages[0].role`."""


def choices_at(kind: type[msgspec.Struct], place: str) -> list[str]:
    """The values that the Literal at `place` allows, in a body of the type `kind`; empty if no Literal is there."""
    types: list[Type] = [type_info(kind)]
    for name in NAME.findall(re.sub(r"\[[^\]]*\]", "", place)):
        structs = [each for each in _parts(types) if isinstance(each, StructType)]
        types = [field.type for struct in structs for field in struct.fields if field.encode_name == name]
    return [str(value) for each in _parts(types) if isinstance(each, LiteralType) for value in each.values]


def _parts(types: Iterable[Type]) -> Iterator[Type]:
    """The types, with those of the alternatives of unions and of the items of lists."""
    for each in types:
        if isinstance(each, UnionType):
            yield from _parts(each.types)
        elif isinstance(each, ListType):
            yield from _parts([each.item_type])
        else:
            yield each
