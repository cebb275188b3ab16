"""Sampling parameters under TensorRT-LLM's names, and their translation to options of `sluice.client`.

None means the model's default (from its generation_config.json), which, unlike TensorRT-LLM's, need not be greedy.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

from sluice.client import Options
from sluice.client.values import as_ids, guide_fields
from sluice.executor.errors import check_name, check_type
from sluice.settings.names import checks_options

CLIENT_OPTIONS = frozenset(Options.__annotations__)
NO_END = -1
"""The `end_id` that disables the end token, as in TensorRT-LLM."""
NEUTRAL_WITHOUT_BEAMS: Mapping[str, tuple[float | None, ...]] = {
    "length_penalty": (None, 0.0, 1.0),
    "early_stopping": (None, False),
    "beam_search_diversity_rate": (None, 0.0),
}
"""Values of parameters of beam search that mean nothing without it: defaults of other libraries."""
OTHER_LIBRARIES = {
    **dict.fromkeys(("stop_strings", "stop_sequences", "stop_words"), "'stop'"),
    **dict.fromkeys(("max_new_tokens", "max_completion_tokens"), "'max_tokens'"),
    **dict.fromkeys(
        ("structured_outputs", "guided", "response_format"), "guided_decoding=GuidedDecodingParams(json=...)"
    ),
    "logit_bias": "'embedding_bias'",
    "bad_words": "'bad'",
    "beam_width": "use_beam_search=True, best_of=...",
    "top_logprobs": "'logprobs'",
    "apply_batched_logits_processor": "logits_processor='batched'",
}
"""What to write in place of parameters of other libraries and of `sluice.client`."""


@checks_options({"json_schema": "'json'", "schema": "'json'", "ebnf": "'grammar'"})
@dataclass(frozen=True, slots=True, kw_only=True)
class GuidedDecodingParams:
    """A constraint on the output. Raises ValueError unless exactly one field is set."""

    json: str | Mapping[str, Any] | type | None = None
    """The output is JSON that this JSON Schema, or the schema of this Pydantic model, validates."""
    regex: str | None = None
    """The output matches this regular expression."""
    grammar: str | None = None
    """The output matches this grammar, in GBNF or Lark's syntax."""
    json_object: bool = False
    """The output is any JSON object."""
    structural_tag: str | None = None
    """The output contains tagged parts that match JSON Schemas; see docs/guided.md."""
    choice: Sequence[str] | None = None
    """The output is one of these texts."""

    def __post_init__(self) -> None:
        if len(self.options()) != 1:
            fields = "json, regex, grammar, json_object, structural_tag and choice"
            raise ValueError(f"GuidedDecodingParams: exactly one of {fields} must be set (got {len(self.options())})")

    def options(self) -> dict[str, Any]:
        """The fields of sluice.v1.GuidedDecoding."""
        fields: dict[str, Any] = guide_fields(
            {
                "json_schema": self.json,
                "regex": self.regex,
                "ebnf": self.grammar,
                "json_object": self.json_object,
                "structural_tag": self.structural_tag,
                "choice": self.choice,
            }
        )
        return fields


@dataclass(frozen=True, slots=True, kw_only=True)
class AdditionalModelOutput:
    """A named tensor of the model to return with the output; see docs/tensors.md."""

    name: str
    gather_context: bool = False
    """Whether to return its rows for prompt positions too."""


@checks_options(OTHER_LIBRARIES)
@dataclass(slots=True, kw_only=True)
class SamplingParams:
    """Sampling, stopping and output options of one request. Fields that are None have the model's or server's default.

    They may be changed until a request is created with them, which checks and copies them.

    The server checks the ranges of values. Raises ValueError for contradictory options, TypeError for a value
    of the wrong type, such as a logits processor in place of its name.
    """

    max_tokens: int | None = 32
    """None: as many as fit into the model's context."""
    min_tokens: int | None = None
    """Minimum number of tokens per output."""
    end_id: int | None = None
    """Token that ends the output in place of the model's EOS tokens; -1: none does."""
    ignore_eos: bool = False
    """Whether to continue after an EOS token."""
    stop: str | Sequence[str] | None = None
    """Texts that end the output."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the output."""
    include_stop_str_in_output: bool = False
    """Whether outputs include the stop string, or the text of the stop token, that ended them."""
    bad: str | Sequence[str] | None = None
    """Words that must not be generated."""
    bad_token_ids: Sequence[int] | None = None
    """Tokens that must not be generated."""
    allowed_token_ids: Sequence[int] | None = None
    """The only tokens that may be generated."""
    embedding_bias: Mapping[int, float] | None = None
    """Bias to add to the logits, by token id."""
    logits_processor: str | Sequence[str] | None = None
    """Names of logits processors, as the server or `GenerationExecutor.create` defines them."""

    n: int = 1
    """Number of outputs to return."""
    best_of: int | None = None
    """Number of outputs to generate, of which the n best are returned; with `use_beam_search`, the beam width."""
    use_beam_search: bool = False
    """Beam search in place of sampling, with `best_of` (default: n) beams."""
    length_penalty: float | None = None
    """With beam search: positive values favour longer outputs, negative values shorter ones."""
    early_stopping: bool | int | None = None
    """As in TensorRT-LLM: 1 (True) stops at `best_of` finished beams, 0 (False) once no better one is likely, any other
    number once no better one is possible."""
    beam_search_diversity_rate: float | None = None
    """With beam search: positive values favour candidates of beams other than the best."""

    temperature: float | None = None
    """0: greedy."""
    top_k: int | None = None
    """Sample from this many most likely tokens; 0: off."""
    top_p: float | None = None
    """Sample from the most likely tokens whose probabilities sum to this; 1: off."""
    min_p: float | None = None
    """Sample from tokens whose probability is at least this fraction of the highest; 0: off."""
    seed: int | None = None
    """None: the server chooses a random seed (TensorRT-LLM: 0)."""
    repetition_penalty: float | None = None
    """Makes tokens of the prompt and the output less likely; 1: off."""
    presence_penalty: float | None = None
    """Subtracted from the logits of tokens that occur in the output; 0: off."""
    frequency_penalty: float | None = None
    """Subtracted from the logit of a token once per occurrence in the output; 0: off."""
    no_repeat_ngram_size: int | None = None
    """No sequence of this many tokens may occur twice; 0: off."""

    logprobs: int | None = None
    """Number of most likely tokens to return with the log-probability of each sampled token; 0: the sampled token's
    only; None: no log-probabilities."""
    prompt_logprobs: int | None = None
    """The same for each token of the prompt."""
    return_context_logits: bool = False
    """Whether to return `GenerationResult.context_logits`."""
    return_generation_logits: bool = False
    """Whether to return `CompletionOutput.generation_logits`."""
    additional_model_outputs: Sequence[AdditionalModelOutput] | None = None
    """Other tensors of the model to return, see `CompletionOutput.tensor`."""
    guided_decoding: GuidedDecodingParams | None = None
    """Constraint on the outputs."""

    add_special_tokens: bool | None = None
    """None: yes for text, no for a chat, whose template adds them."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many of the last prompt tokens."""
    skip_special_tokens: bool = True
    """Whether to omit special tokens from the text."""
    detokenize: bool = True
    """False: outputs have no text."""
    pad_id: int | None = None
    """No effect, since nothing is padded."""
    stream_interval: int | None = None
    """Minimum number of tokens per response."""

    def __post_init__(self) -> None:
        if self.best_of is not None and self.best_of < self.n:
            raise ValueError(f"best_of is {self.best_of}, must be at least n, which is {self.n}")
        for name, neutral in NEUTRAL_WITHOUT_BEAMS.items():
            if getattr(self, name) not in neutral and not self.use_beam_search:
                raise ValueError(f"{name} needs use_beam_search=True")
        if self.guided_decoding is not None:
            check_type("guided_decoding", self.guided_decoding, GuidedDecodingParams)
        for output in self.additional_model_outputs or ():
            check_type("additional_model_outputs: each value", output, AdditionalModelOutput)
        processors = self.logits_processor or ()
        several = isinstance(processors, Sequence) and not isinstance(processors, str)
        for processor in processors if several else [processors]:
            check_name(
                "logits_processor",
                processor,
                "the name of a logits processor of the server, or of create(logits_processors={name: function})",
            )

    @property
    def eos_id(self) -> int | None:
        """The token that replaces the model's EOS; None: no token does."""
        return None if self.ignore_eos or self.end_id == NO_END else self.end_id

    def options(self) -> Options:
        """The parameters as options of `sluice.client`."""
        tensors = [{"name": each.name, "context": each.gather_context} for each in self.additional_model_outputs or ()]
        translated = Options(
            # `end_id` replaces the model's EOS: EOS is ignored, and `end_id` becomes a stop token.
            ignore_eos=self.ignore_eos or self.end_id is not None or None,
            stop_token_ids=self._stop_token_ids(),
            include_stop_in_output=self.include_stop_str_in_output or None,
            bad_words=self.bad,
            logit_bias=self.embedding_bias,
            logits_processors=self.logits_processor,
            best_of=None if self.use_beam_search or self.best_of == self.n else self.best_of,
            beam_search=self._beam_search() if self.use_beam_search else None,
            context_logits=self.return_context_logits or None,
            generation_logits=self.return_generation_logits or None,
            tensors=tensors or None,
            guided=self.guided_decoding.options() if self.guided_decoding else None,
        )
        shared = {each.name: getattr(self, each.name) for each in fields(self) if each.name in CLIENT_OPTIONS}
        return cast(Options, shared) | translated

    def _beam_search(self) -> dict[str, Any]:
        early = self.early_stopping
        settings = {
            "width": self.best_of or self.n,
            "length_penalty": self.length_penalty,
            "early_stopping": None if early is None else early == 1,
            "exhaustive": None if early is None else early not in (0, 1),
            "diversity_rate": self.beam_search_diversity_rate,
        }
        return {name: value for name, value in settings.items() if value is not None}

    def _stop_token_ids(self) -> list[int] | None:
        ends = [] if self.eos_id is None else [self.eos_id]
        given = [] if self.stop_token_ids is None else as_ids("stop_token_ids", self.stop_token_ids)
        return [*given, *ends] or None
