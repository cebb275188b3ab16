"""Helpers for tests of guides with the tiny model's tokenizer."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from engine_worker.guided.guides import Guides
from engine_worker.guided.masks import GuidedSequence, MaskRequest
from engine_worker.guided.processes import GuideModel
from sluice import tiny_model
from sluice.settings.engine import GuideLimits
from sluice.wire.errors import Fault
from sluice.wire.params import Guide, GuideKind
from tests.fakes.processes import LIMIT, wait_until

VOCAB = 4096
END = 4093
TOKENIZER_FILE = tiny_model.path() / "tokenizer.json"


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(TOKENIZER_FILE))


def ids(text: str) -> list[int]:
    return tokenizer().encode(text).ids


def make(model: GuideModel | None = None, **limits) -> Guides:
    return Guides(model or GuideModel(TOKENIZER_FILE, VOCAB, (END,)), GuideLimits(**limits))


def regex(text: str) -> Guide:
    return Guide(GuideKind.REGEX, text)


def prepared(guides: Guides, guide: Guide, seconds: float = LIMIT) -> Fault | None:
    """Wait until the guide is prepared; returns its fault."""
    preparation = guides.prepare(guide)
    assert preparation is None or wait_until(preparation.poll, seconds)
    return None if preparation is None else preparation.fault


def followed(guides: Guides, guide: Guide, ends: Sequence[int] = (END,), size: int = 1) -> list[GuidedSequence]:
    assert prepared(guides, guide) is None
    return guides.sequences(guide, ends, size)


class Masked(NamedTuple):
    """The result of one request: a mask, or the reason for which there is none."""

    allowed: NDArray[np.uint32] | None
    complete: bool
    fault: Fault | None
    later: bool = False


def masked(guides: Guides, *requests: MaskRequest) -> list[Masked]:
    masks = masked_so_far(guides, *requests)
    while postponed := {
        request.sequence.guide for request, result in zip(requests, masks, strict=True) if result.later
    }:
        for guide in postponed:
            assert prepared(guides, guide) is None
        masks = masked_so_far(guides, *requests)
    return masks


def masked_so_far(guides: Guides, *requests: MaskRequest) -> list[Masked]:
    guides.masks.request(requests)
    allowed, faults, complete, unread, later = guides.masks.collect()
    without = {*faults, *complete, *unread, *later}
    return [
        Masked(None if i in without else allowed[i], i in complete, faults.get(i), i in later)
        for i in range(len(requests))
    ]


def mask(
    guides: Guides, sequence: GuidedSequence, output: Sequence[int], drafts: Sequence[int] = (), *, may_end: bool = True
) -> Masked:
    return masked(guides, MaskRequest(sequence, output, len(output), drafts, may_end))[0]


def allowed(result: Masked) -> set[int]:
    assert result.fault is None
    assert result.allowed is not None
    return set(np.flatnonzero(np.unpackbits(result.allowed.view(np.uint8), bitorder="little")).tolist())


def texts(result: Masked) -> set[str]:
    return {tokenizer().id_to_token(each) for each in allowed(result)}
