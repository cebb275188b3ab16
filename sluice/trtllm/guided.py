"""Guided decoding: constraints on outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

from sluice.trtllm.errors import OptionError


class GuideType(Enum):
    JSON = 0
    JSON_SCHEMA = 1
    REGEX = 2
    EBNF_GRAMMAR = 3
    STRUCTURAL_TAG = 4


class GuidedDecodingBackend(Enum):
    XGRAMMAR = 0
    LLGUIDANCE = 1


@dataclass
class GuidedDecodingParams:
    """A constraint on the output of a request. Raises OptionError for a type without its guide."""

    guide_type: GuideType
    guide: str | None = None

    GuideType: ClassVar[type[GuideType]] = GuideType

    def __post_init__(self) -> None:
        if self.guide is None and self.guide_type is not GuideType.JSON:
            raise OptionError(f"GuidedDecodingParams: {self.guide_type.name} needs a guide")


@dataclass
class GuidedDecodingConfig:
    """No effect: guided decoding is always enabled, with llguidance, the checkpoint's tokenizer and its end tokens."""

    backend: GuidedDecodingBackend
    encoded_vocab: Sequence[str] | None = None
    tokenizer_str: str | None = None
    stop_token_ids: Sequence[int] | None = None

    GuidedDecodingBackend: ClassVar[type[GuidedDecodingBackend]] = GuidedDecodingBackend
