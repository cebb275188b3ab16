"""Translates a `Request` to the executor's `GenerationRequest`."""

import logging
from dataclasses import dataclass, replace
from typing import Any

from sluice import executor
from sluice.client import Options
from sluice.client.values import as_ids
from sluice.executor import GenerationRequest, SamplingParams
from sluice.trtllm.bias import Bias, read_bias
from sluice.trtllm.cache_config import KvCacheRetentionConfig
from sluice.trtllm.enums import KvCacheTransferMode
from sluice.trtllm.errors import OptionError, UnsupportedOptionError, refuse_added, refuse_changed
from sluice.trtllm.guided import GuidedDecodingParams, GuideType
from sluice.trtllm.lora_tasks import LoraTasks
from sluice.trtllm.model_inputs import PromptTuningConfig
from sluice.trtllm.processors import DYNAMIC
from sluice.trtllm.request import DEFAULT_PRIORITY, Request
from sluice.trtllm.sampling import OutputConfig, SamplingConfig
from sluice.trtllm.speculation import ExternalDraftTokensConfig
from sluice.trtllm.words import Words

log = logging.getLogger("sluice.trtllm")
NO_END = -1
DECODER_ONLY = "only decoder-only models are served"
NO_ADAPTERS = "engines serve adapters only if ExecutorConfig.peft_cache_config is set"
MULTIMODAL = "images and other modalities are not implemented"
MODEL_DRAFTS = (
    "draft tokens can only come from external_draft_tokens_config, or from the engine's n-grams or draft model"
)
REQUEST_REASONS = {
    "multimodal_input": MULTIMODAL,
    "multimodal_embedding": MULTIMODAL,
    "mrope_config": MULTIMODAL,
    "lookahead_config": MODEL_DRAFTS,
    "eagle_config": MODEL_DRAFTS,
    "encoder_input_token_ids": DECODER_ONLY,
    "encoder_input_features": DECODER_ONLY,
    "encoder_output_length": DECODER_ONLY,
    "cross_attention_mask": DECODER_ONLY,
    "skip_cross_attn_blocks": DECODER_ONLY,
    "language_adapter_uid": DECODER_ONLY,
    "request_type": "context and generation always run in the same engine",
    "context_phase_params": "context and generation always run in the same engine",
}
SAMPLING_REASONS = {
    "top_p_min": "top_p does not decay",
    "top_p_reset_ids": "top_p does not decay",
    "beam_width_array": "the width of a beam search is constant",
}
OUTPUT_REASONS = {
    "return_encoder_output": DECODER_ONLY,
}
FAST_LOGITS_REASON = "no draft model runs in another process; give logits as a tensor"
GUIDES = {
    GuideType.JSON_SCHEMA: "json",
    GuideType.REGEX: "regex",
    GuideType.EBNF_GRAMMAR: "grammar",
    GuideType.STRUCTURAL_TAG: "structural_tag",
}


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
        bias = read_bias(request.embedding_bias, self.vocab_size)
        return _biased(params, bias) if isinstance(bias, Bias) else InvalidParams(reason=bias)

    def _words(self, request: Request) -> dict[str, Any]:
        stops, bads = request.stop_words or (), request.bad_words or ()
        return {
            "stop_token_ids": [ids[0] for ids in stops if len(ids) == 1] or None,
            "stop": [self.words.text("Request.stop_words", ids) for ids in stops if len(ids) > 1] or None,
            "include_stop_str_in_output": True,
            "bad_token_ids": [ids[0] for ids in bads if len(ids) == 1] or None,
            "bad": [self.words.text("Request.bad_words", ids) for ids in bads if len(ids) > 1] or None,
        }


DEFAULTS: dict[str, Any] = {
    "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 0,
    "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
}  # fmt: skip
"""TensorRT-LLM's values of unset parameters, in place of the server's."""


def _check(request: Request) -> None:
    refuse_added(request)
    defaults = Request([0], 1)
    refuse_changed(request, defaults, REQUEST_REASONS)
    refuse_changed(request.sampling_config, defaults.sampling_config, SAMPLING_REASONS)
    refuse_changed(request.output_config, defaults.output_config, OUTPUT_REASONS)
    if (decay := request.sampling_config.top_p_decay) not in (None, 1.0):
        raise UnsupportedOptionError(f"SamplingConfig.top_p_decay = {decay}", "top_p does not decay")
    positions = request.position_ids
    if positions is not None and list(positions) != list(range(len(request.input_token_ids))):
        raise UnsupportedOptionError("Request.position_ids", "the positions of a prompt are always 0, 1, 2, …")


def _sampling(config: SamplingConfig, num_return_sequences: int) -> SamplingParams:
    n = config.num_return_sequences or num_return_sequences
    greedy = not config.top_k and config.top_p is None
    params = SamplingParams(
        n=n,
        temperature=0.0 if greedy else 1.0 if config.temperature is None else config.temperature,
        min_tokens=config.min_tokens,
        no_repeat_ngram_size=config.no_repeat_ngram_size,
        **_with_defaults(config),
    )
    if config.beam_width > 1 and config.temperature not in (None, 0.0, 1.0):
        reason = "beam search does not divide the logits by a temperature"
        raise UnsupportedOptionError(f"SamplingConfig.temperature = {config.temperature}", reason)
    if config.beam_width == 1:
        # Without beams, their options have no effect, as in TensorRT-LLM.
        return params
    return replace(
        params,
        n=config.num_return_sequences or config.beam_width,
        best_of=config.beam_width,
        use_beam_search=True,
        length_penalty=config.length_penalty,
        early_stopping=config.early_stopping,
        beam_search_diversity_rate=config.beam_search_diversity_rate,
    )


def _with_defaults(config: SamplingConfig) -> dict[str, Any]:
    given = {name: getattr(config, name) for name in DEFAULTS}
    return {name: DEFAULTS[name] if value is None else value for name, value in given.items()}


def _outputs(config: OutputConfig) -> dict[str, Any]:
    tensors = [
        executor.AdditionalModelOutput(name=tensor.name, gather_context=tensor.gather_context)
        for tensor in config.additional_model_outputs or ()
    ]
    return {
        "logprobs": 0 if config.return_log_probs else None,
        "return_context_logits": config.return_context_logits,
        "return_generation_logits": config.return_generation_logits,
        "additional_model_outputs": tensors or None,
    }


def _biased(params: SamplingParams, bias: Bias) -> SamplingParams:
    banned = [*(params.bad_token_ids or ()), *bias.banned]
    return replace(
        params,
        embedding_bias=bias.added or None,
        bad_token_ids=banned or None,
        allowed_token_ids=bias.forced or None,
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
    return executor.KvCacheRetentionConfig(
        [
            executor.TokenRangeRetentionConfig(part.token_start, part.token_end, part.priority, part.duration_ms)
            for part in config.token_range_retention_configs
        ],
        config.decode_retention_priority,
        config.decode_duration_ms,
    )


def _priority(priority: float) -> executor.Priority:
    if priority == DEFAULT_PRIORITY:
        return "normal"
    return "low" if priority < DEFAULT_PRIORITY else "high"
