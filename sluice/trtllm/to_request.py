"""Translates a `Request` to the executor's `GenerationRequest`."""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from sluice import executor
from sluice.client import Options
from sluice.client.values import as_ids
from sluice.executor import GenerationRequest, SamplingParams
from sluice.executor.sampling import NEUTRAL_WITHOUT_BEAMS, NO_END
from sluice.trtllm.enums import KvCacheTransferMode
from sluice.trtllm.lora import LoraTasks
from sluice.trtllm.options import OptionError, UnsupportedOptionError, refuse_added, refuse_changed, translated
from sluice.trtllm.processors import DYNAMIC
from sluice.trtllm.request import (
    DEFAULT_PRIORITY,
    GuidedDecodingParams,
    GuideType,
    KvCacheRetentionConfig,
    OutputConfig,
    PromptTuningConfig,
    Request,
    SamplingConfig,
)
from sluice.trtllm.speculation import ExternalDraftTokensConfig

log = logging.getLogger("sluice.trtllm")
NO_ADAPTERS = "engines serve adapters only if ExecutorConfig.peft_cache_config is set"
FAST_LOGITS_REASON = "no draft model runs in another process; give logits as a tensor"
GUIDES = {
    GuideType.JSON_SCHEMA: "json",
    GuideType.REGEX: "regex",
    GuideType.EBNF_GRAMMAR: "grammar",
    GuideType.STRUCTURAL_TAG: "structural_tag",
}
DEFAULTS: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""TensorRT-LLM's values of unset parameters, used in place of the server's."""
UNBOUNDED = 1e4
"""A bias of a larger magnitude bans or forces its token, since no model's logits are that far apart."""
UNDECODABLE = "\ufffd"


class Words:
    """Decodes words with the checkpoint's tokenizer."""

    def __init__(self, tokenizer_file: Path) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(tokenizer_file))

    def text(self, option: str, ids: Sequence[int]) -> str:
        """The text of a word. Raises UnsupportedOptionError unless the tokenizer encodes that text as these tokens."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True)
        if UNDECODABLE in text or self._tokenizer.encode(text, add_special_tokens=False).ids != list(ids):
            raise UnsupportedOptionError(
                f"{option} {list(ids)}",
                "words of several tokens are matched as text, which the tokenizer does not encode as these tokens",
            )
        return text


@dataclass(slots=True, kw_only=True)
class InvalidParams(SamplingParams):
    """Parameters that fail their request, with `reason` as the error of its response."""

    reason: str

    def options(self) -> Options:
        raise OptionError(self.reason)


@dataclass(frozen=True, slots=True)
class Translator:
    """Translates the requests of one executor."""

    words: Words
    vocab_size: int
    max_beam_width: int
    tasks: LoraTasks | None = None
    """None: the executor serves no adapters."""

    def translate(self, request: Request) -> GenerationRequest:
        """Raises UnsupportedOptionError for an unsupported option, OptionError for an invalid one."""
        _check(request)
        beam_width = request.sampling_config.beam_width
        if beam_width > self.max_beam_width:
            limit = f"ExecutorConfig.max_beam_width, which is {self.max_beam_width}"
            raise OptionError(f"SamplingConfig.beam_width is {beam_width}, must be at most {limit}")
        return GenerationRequest(
            as_ids("Request.input_token_ids", request.input_token_ids),
            self._sampling_params(request),
            request.streaming,
            self._adapter(request),
            kv_cache_retention_config=_retention(request.kv_cache_retention_config),
            client_id=request.client_id,
            priority=_priority(request.priority),
            allotted_time_ms=request.allotted_time_ms,
            cache_salt=None if request.cache_salt_id is None else str(request.cache_salt_id),
            prompt_table=_table(request.prompt_tuning_config),
            return_perf_metrics=request.output_config.return_perf_metrics,
            **_drafts(request.external_draft_tokens_config),
        )

    def _adapter(self, request: Request) -> executor.LoRARequest | None:
        if request.lora_config is None:
            return None
        if self.tasks is None:
            raise UnsupportedOptionError("Request.lora_config", NO_ADAPTERS)
        return self.tasks.find(request.lora_config)

    def _sampling_params(self, request: Request) -> SamplingParams:
        params = replace(
            _sampling(request.sampling_config, request.num_return_sequences),
            max_tokens=request.max_tokens,
            end_id=NO_END if request.end_id is None else request.end_id,
            logits_processor=request.logits_post_processor_name if request.logits_post_processor is None else DYNAMIC,
            guided_decoding=_guide(request.guided_decoding_params),
            **self._words(request),
            **_outputs(request.output_config),
        )
        if request.embedding_bias is None:
            return params
        return _biased(params, request.embedding_bias, self.vocab_size)

    def _words(self, request: Request) -> dict[str, Any]:
        stops, bads = request.stop_words or (), request.bad_words or ()
        return {
            "stop_token_ids": [ids[0] for ids in stops if len(ids) == 1] or None,
            "stop": [self.words.text("Request.stop_words", ids) for ids in stops if len(ids) > 1] or None,
            "include_stop_str_in_output": True,
            "bad_token_ids": [ids[0] for ids in bads if len(ids) == 1] or None,
            "bad": [self.words.text("Request.bad_words", ids) for ids in bads if len(ids) > 1] or None,
        }


def _check(request: Request) -> None:
    refuse_added(request)
    for owner in (request, request.sampling_config, request.output_config):
        refuse_changed(owner)
    if (decay := request.sampling_config.top_p_decay) not in (None, 1.0):
        raise UnsupportedOptionError(f"SamplingConfig.top_p_decay = {decay}", "top_p does not decay")
    positions = request.position_ids
    if positions is not None and list(positions) != list(range(len(request.input_token_ids))):
        raise UnsupportedOptionError("Request.position_ids", "the positions of a prompt are always 0, 1, 2, …")


def _sampling(config: SamplingConfig, num_return_sequences: int) -> SamplingParams:
    beams = config.beam_width > 1
    if beams and config.temperature not in (None, 0.0, 1.0):
        reason = "beam search does not divide the logits by a temperature"
        raise UnsupportedOptionError(f"SamplingConfig.temperature = {config.temperature}", reason)
    given: dict[str, Any] = {name: value for name, value in DEFAULTS.items() if getattr(config, name) is None}
    if not config.top_k and config.top_p is None:
        given["temperature"] = 0.0
    if beams:
        given |= {"best_of": config.beam_width, "use_beam_search": True}
    else:
        # Without beams, their options have no effect, as in TensorRT-LLM.
        given |= dict.fromkeys(NEUTRAL_WITHOUT_BEAMS)
    n = config.num_return_sequences or (config.beam_width if beams else num_return_sequences)
    return translated(SamplingParams, config, n=n, **given)


def _outputs(config: OutputConfig) -> dict[str, Any]:
    tensors = [translated(executor.AdditionalModelOutput, tensor) for tensor in config.additional_model_outputs or ()]
    return {
        "logprobs": 0 if config.return_log_probs else None,
        "return_context_logits": config.return_context_logits,
        "return_generation_logits": config.return_generation_logits,
        "additional_model_outputs": tensors or None,
    }


def _biased(params: SamplingParams, tensor: Any, vocab_size: int) -> SamplingParams:
    """`params` with the biases of a tensor [vocab_size]; InvalidParams if the tensor cannot be used."""
    if tuple(tensor.shape) != (vocab_size,):
        reason = f"embedding bias shape is not as expected: it is {list(tensor.shape)}, must be [{vocab_size}]"
        return InvalidParams(reason=reason)
    biases = {token: float(value) for token, value in enumerate(tensor.tolist()) if value != 0}
    if any(map(math.isnan, biases.values())):
        return InvalidParams(reason="embedding bias must not be NaN")
    banned = [token for token, value in biases.items() if value < -UNBOUNDED]
    highest = max(biases.values(), default=0.0)
    # Among several tokens above UNBOUNDED, only those with the highest bias can win.
    forced = [token for token, value in biases.items() if value == highest] if highest > UNBOUNDED else []
    return replace(
        params,
        embedding_bias={token: value for token, value in biases.items() if abs(value) <= UNBOUNDED} or None,
        bad_token_ids=[*(params.bad_token_ids or ()), *banned] or None,
        allowed_token_ids=forced or None,
    )


def _guide(params: GuidedDecodingParams | None) -> executor.GuidedDecodingParams | None:
    if params is None:
        return None
    if params.guide_type is GuideType.JSON:
        return executor.GuidedDecodingParams(json_object=True)
    guide: dict[str, Any] = {GUIDES[params.guide_type]: params.guide}
    return executor.GuidedDecodingParams(**guide)


def _drafts(config: ExternalDraftTokensConfig | None) -> dict[str, Any]:
    if config is None:
        return {}
    if config.fast_logits:
        raise UnsupportedOptionError("ExternalDraftTokensConfig.fast_logits", FAST_LOGITS_REASON)
    drafts = {"draft_token_ids": list(config.tokens), "draft_logits": config.logits}
    if config.logits is not None:
        return drafts | {"acceptance_threshold": config.acceptance_threshold}
    if config.acceptance_threshold is not None:
        # TensorRT-LLM ignores it too: without logits it compares tokens.
        log.warning("ExternalDraftTokensConfig.acceptance_threshold has no effect without logits")
    return drafts


def _table(config: PromptTuningConfig | None) -> dict[str, Any] | None:
    if config is None:
        return None
    return {"embeddings": config.embedding_table, "token_extra_ids": config.input_token_extra_ids}


def _retention(config: KvCacheRetentionConfig | None) -> executor.KvCacheRetentionConfig | None:
    if config is None:
        return None
    if config.transfer_mode is not KvCacheTransferMode.DRAM or config.directory:
        reason = "evicted blocks can only be kept in main memory"
        raise UnsupportedOptionError("KvCacheRetentionConfig.transfer_mode", reason)
    ranges = [translated(executor.TokenRangeRetentionConfig, part) for part in config.token_range_retention_configs]
    return translated(executor.KvCacheRetentionConfig, config, token_range_retention_configs=ranges)


def _priority(priority: float) -> executor.Priority:
    if priority == DEFAULT_PRIORITY:
        return "normal"
    return "low" if priority < DEFAULT_PRIORITY else "high"
