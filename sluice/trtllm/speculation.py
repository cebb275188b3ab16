"""Draft tokens, and decoding modes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntFlag, auto
from typing import Annotated, Any

from sluice.trtllm.options import (
    ABOVE_0_TO_1,
    MATRIX,
    NOT_EMPTY,
    NOT_NEGATIVE,
    POSITIVE,
    Checked,
    OptionError,
    UnsupportedOptionError,
)


@dataclass(eq=False)
class ExternalDraftTokensConfig(Checked):
    """Draft tokens of a request. Raises OptionError for a value out of range, or for logits of a wrong shape."""

    tokens: Annotated[Sequence[int], NOT_EMPTY]
    """The expected output, from its first token on."""
    logits: Annotated[Any, MATRIX] = None
    """Tensor [tokens, vocabulary] of the logits that the draft tokens were sampled from."""
    acceptance_threshold: Annotated[float | None, ABOVE_0_TO_1] = None
    """In (0, 1]; effective only with `logits`."""
    fast_logits: bool | None = None

    def __post_init__(self) -> None:
        if self.logits is not None and not self.fast_logits and len(self.logits) != len(self.tokens):
            raise OptionError(f"logits has {len(self.logits)} rows, must have {len(self.tokens)}, one for each token")


@dataclass
class LookaheadDecodingConfig(Checked):
    max_window_size: Annotated[int, POSITIVE]
    max_ngram_size: Annotated[int, POSITIVE]
    max_verification_set_size: Annotated[int, NOT_NEGATIVE]

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
    dynamic_tree_max_topK: int | None = None


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


def _creates(mode: _Mode) -> "Callable[[], DecodingMode]":
    return lambda: DecodingMode(mode)


def _has(mode: _Mode) -> "Callable[[DecodingMode], bool]":
    return lambda self: mode in self._mode


class DecodingMode:
    """How tokens are decoded. Create one with a static method, such as `DecodingMode.TopK()`."""

    def __init__(self, mode: _Mode) -> None:
        self._mode = mode

    Auto = staticmethod(_creates(_Mode.AUTO))
    TopK = staticmethod(_creates(_Mode.TOP_K))
    TopP = staticmethod(_creates(_Mode.TOP_P))
    TopKTopP = staticmethod(_creates(_BOTH))
    BeamSearch = staticmethod(_creates(_Mode.BEAM_SEARCH))
    Medusa = staticmethod(_creates(_Mode.MEDUSA))
    Lookahead = staticmethod(_creates(_Mode.LOOKAHEAD))
    ExplicitDraftTokens = staticmethod(_creates(_Mode.EXPLICIT_DRAFT_TOKENS))
    Eagle = staticmethod(_creates(_Mode.EAGLE))

    isAuto = _has(_Mode.AUTO)
    isTopK = _has(_Mode.TOP_K)
    isTopP = _has(_Mode.TOP_P)
    isTopKandTopP = _has(_BOTH)
    isBeamSearch = _has(_Mode.BEAM_SEARCH)
    isMedusa = _has(_Mode.MEDUSA)
    isLookahead = _has(_Mode.LOOKAHEAD)
    isExplicitDraftTokens = _has(_Mode.EXPLICIT_DRAFT_TOKENS)
    isEagle = _has(_Mode.EAGLE)

    # ruff: noqa: N802, N815
    def isTopKorTopP(self) -> bool:
        return self.isTopK() or self.isTopP()

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
