"""Constraints on outputs."""

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
    guide_type: GuideType
    guide: str | None = None

    GuideType: ClassVar[type[GuideType]] = GuideType

    def __post_init__(self) -> None:
        if self.guide is None and self.guide_type is not GuideType.JSON:
            raise OptionError(f"GuidedDecodingParams: {self.guide_type.name} needs a guide")


@dataclass
class GuidedDecodingConfig:
    """Every ring can follow guides, by llguidance and with the checkpoint's own tokenizer and end tokens."""

    backend: GuidedDecodingBackend
    encoded_vocab: Sequence[str] | None = None
    tokenizer_str: str | None = None
    stop_token_ids: Sequence[int] | None = None

    GuidedDecodingBackend: ClassVar[type[GuidedDecodingBackend]] = GuidedDecodingBackend
