"""Draft tokens, and decoding modes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntFlag, auto
from typing import Any, ClassVar

from sluice.trtllm.options import (
    ABOVE_0_TO_1,
    MATRIX,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Checked,
    Limit,
    OptionError,
    UnsupportedOptionError,
)


@dataclass(eq=False)
class ExternalDraftTokensConfig(Checked):
    """Draft tokens of a request. Raises OptionError for a value out of range, or for logits of a wrong shape."""

    tokens: Sequence[int]
    """The expected output, from its first token on."""
    logits: Any = None
    """Tensor [tokens, vocabulary] of the logits that the draft tokens were sampled from."""
    acceptance_threshold: float | None = None
    """In (0, 1]; effective only with `logits`."""
    fast_logits: bool | None = None

    LIMITS: ClassVar[Mapping[str, Limit]] = {
        "tokens": NOT_EMPTY,
        "logits": MATRIX,
        "acceptance_threshold": ABOVE_0_TO_1,
    }

    def __post_init__(self) -> None:
        if self.logits is not None and not self.fast_logits and len(self.logits) != len(self.tokens):
            raise OptionError(f"logits has {len(self.logits)} rows, must have {len(self.tokens)}, one for each token")


@dataclass
class LookaheadDecodingConfig(Checked):
    max_window_size: int
    max_ngram_size: int
    max_verification_set_size: int

    LIMITS: ClassVar[Mapping[str, Limit]] = {
        "max_window_size": POSITIVE,
        "max_ngram_size": POSITIVE,
        "max_verification_set_size": NOT_NEGATIVE,
    }

    def __post_init__(self) -> None:
        if self.max_ngram_size == 1 and (self.max_window_size, self.max_verification_set_size) != (1, 0):
            raise OptionError("max_ngram_size=1 needs max_window_size=1 and max_verification_set_size=0")

    def calculate_speculative_resource(self) -> tuple[int, int, int, int]:
        """Maximum (tokens per step, path length, draft tokens, draft path length)."""
        sizes = (self.max_window_size, self.max_ngram_size, self.max_verification_set_size)
        return LookaheadDecodingConfig.calculate_speculative_resource_tuple(*sizes)

    @staticmethod
    def calculate_speculative_resource_tuple(
        window_size: int, ngram_size: int, verification_set_size: int
    ) -> tuple[int, int, int, int]:
        drafts = max(0, ngram_size - 2) + (window_size - 1 + verification_set_size) * (ngram_size - 1)
        return 1 + drafts, ngram_size, drafts, ngram_size - 1

    @staticmethod
    def get_default_lookahead_decoding_window() -> int:
        return 4

    @staticmethod
    def get_default_lookahead_decoding_ngram() -> int:
        return 3

    @staticmethod
    def get_default_lookahead_decoding_verification_set() -> int:
        return 4


@dataclass
class EagleConfig:
    eagle_choices: Sequence[Sequence[int]] | None = None
    greedy_sampling: bool = True
    posterior_threshold: float | None = None
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None  # noqa: N815


@dataclass
class SpeculativeDecodingConfig:
    fast_logits: bool = False


@dataclass
class SpeculativeDecodingFastLogitsInfo:
    draft_request_id: int = 0
    draft_participant_id: int = 0

    def to_tensor(self) -> Any:
        """Not supported: raises UnsupportedOptionError."""
        raise UnsupportedOptionError("SpeculativeDecodingFastLogitsInfo", "no draft model runs in another process")


class _Mode(IntFlag):
    AUTO = auto()
    TOP_K = auto()
    TOP_P = auto()
    BEAM_SEARCH = auto()
    MEDUSA = auto()
    LOOKAHEAD = auto()
    EXPLICIT_DRAFT_TOKENS = auto()
    EAGLE = auto()


_BOTH = _Mode.TOP_K | _Mode.TOP_P


class DecodingMode:
    """How tokens are decoded. Create one with a static method, such as `DecodingMode.TopK()`."""

    def __init__(self, mode: _Mode) -> None:
        self._mode = mode

    # ruff: noqa: N802
    @staticmethod
    def Auto() -> "DecodingMode":
        return DecodingMode(_Mode.AUTO)

    @staticmethod
    def TopK() -> "DecodingMode":
        return DecodingMode(_Mode.TOP_K)

    @staticmethod
    def TopP() -> "DecodingMode":
        return DecodingMode(_Mode.TOP_P)

    @staticmethod
    def TopKTopP() -> "DecodingMode":
        return DecodingMode(_BOTH)

    @staticmethod
    def BeamSearch() -> "DecodingMode":
        return DecodingMode(_Mode.BEAM_SEARCH)

    @staticmethod
    def Medusa() -> "DecodingMode":
        return DecodingMode(_Mode.MEDUSA)

    @staticmethod
    def Lookahead() -> "DecodingMode":
        return DecodingMode(_Mode.LOOKAHEAD)

    @staticmethod
    def ExplicitDraftTokens() -> "DecodingMode":
        return DecodingMode(_Mode.EXPLICIT_DRAFT_TOKENS)

    @staticmethod
    def Eagle() -> "DecodingMode":
        return DecodingMode(_Mode.EAGLE)

    def isAuto(self) -> bool:
        return _Mode.AUTO in self._mode

    def isTopK(self) -> bool:
        return _Mode.TOP_K in self._mode

    def isTopP(self) -> bool:
        return _Mode.TOP_P in self._mode

    def isTopKorTopP(self) -> bool:
        return bool(self._mode & _BOTH)

    def isTopKandTopP(self) -> bool:
        return _BOTH in self._mode

    def isBeamSearch(self) -> bool:
        return _Mode.BEAM_SEARCH in self._mode

    def isMedusa(self) -> bool:
        return _Mode.MEDUSA in self._mode

    def isLookahead(self) -> bool:
        return _Mode.LOOKAHEAD in self._mode

    def isExplicitDraftTokens(self) -> bool:
        return _Mode.EXPLICIT_DRAFT_TOKENS in self._mode

    def isEagle(self) -> bool:
        return _Mode.EAGLE in self._mode

    def useVariableBeamWidthSearch(self, use: bool) -> "DecodingMode":
        """Not supported: raises UnsupportedOptionError if `use` is true."""
        if use:
            name = "DecodingMode.useVariableBeamWidthSearch"
            raise UnsupportedOptionError(name, "the width of a beam search is constant")
        return self

    @property
    def name(self) -> str:
        if self._mode == _BOTH:
            return "TopKTopP"
        return "".join(part.capitalize() for part in str(self._mode.name).split("_"))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodingMode) and self._mode == other._mode

    def __hash__(self) -> int:
        return hash(self._mode)

    def __repr__(self) -> str:
        return f"DecodingMode.{self.name}()"


@dataclass
class DecodingConfig:
    """The decoding mode and its configuration. Assigning `lookahead_decoding_config`, `medusa_choices` or
    `eagle_config` also sets `decoding_mode`."""

    decoding_mode: DecodingMode | None = None
    lookahead_decoding_config: LookaheadDecodingConfig | None = None
    medusa_choices: Sequence[Sequence[int]] | None = None
    eagle_config: EagleConfig | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        modes = {
            "lookahead_decoding_config": DecodingMode.Lookahead,
            "medusa_choices": DecodingMode.Medusa,
            "eagle_config": DecodingMode.Eagle,
        }
        if value is not None and name in modes:
            self.decoding_mode = modes[name]()
