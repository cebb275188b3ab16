"""Submits, with the fields of their extras given and read like their own."""

from typing import Any

from msgspec.structs import replace

from sluice.wire.requests import NO_EXTRAS, Extras, Submit


def submit_of(**fields: Any) -> Submit:
    return with_extras(Submit(**{name: value for name, value in fields.items() if name not in NAMES}), **fields)


def extras_of(submit: Submit) -> Extras:
    return submit.extras or NO_EXTRAS


def with_extras(submit: Submit, **fields: Any) -> Submit:
    """A copy with those of `fields` that belong to its extras."""
    extras = replace(extras_of(submit), **{name: value for name, value in fields.items() if name in NAMES})
    return replace(submit, extras=None if extras == NO_EXTRAS else extras)


NAMES = frozenset(Extras.__struct_fields__)
