"""Translation of requests: what each option becomes, and which options are refused."""

from dataclasses import replace
from datetime import timedelta

import pytest
import torch

import sluice.trtllm as trtllm
from sluice import executor, tiny_model
from sluice.client.requests import build_spec
from sluice.trtllm.to_request import Translator, Words
from sluice.v1 import generation_pb2 as pb

VOCABULARY = 4096
TOKENIZER = tiny_model.path() / "tokenizer.json"
Range = trtllm.KvCacheRetentionConfig.TokenRangeRetentionConfig
Guide = trtllm.GuidedDecodingParams.GuideType


@pytest.fixture(scope="module")
def translator() -> Translator:
    return Translator(Words(TOKENIZER), VOCABULARY, 4)


def params(translator, **options) -> executor.SamplingParams:
    return translator.translate(trtllm.Request([1, 2], 7, **options)).sampling_params


def sampling(translator, *beam_width, **options) -> executor.SamplingParams:
    return params(translator, sampling_config=trtllm.SamplingConfig(*beam_width, **options))


def test_a_plain_request_is_greedy_and_has_no_end_token(translator) -> None:
    translated = params(translator)
    assert (translated.max_tokens, translated.temperature, translated.end_id, translated.seed, translated.n) == (
        7,
        0.0,
        -1,
        0,
        1,
    )
    assert (translated.repetition_penalty, translated.presence_penalty, translated.logprobs) == (1.0, 0.0, None)


def test_sampling(translator) -> None:
    assert sampling(translator, temperature=0.5).temperature == 0.0
    k = sampling(translator, top_k=5)
    assert (k.top_k, k.top_p, k.temperature) == (5, 1.0, 1.0)
    p = sampling(translator, top_p=0.5, temperature=0.25)
    assert (p.top_k, p.top_p, p.temperature) == (0, 0.5, 0.25)
    translated = sampling(
        translator, top_k=1, seed=3, min_tokens=2, no_repeat_ngram_size=4, min_p=0.5, frequency_penalty=1.5
    )
    assert (translated.seed, translated.min_tokens, translated.no_repeat_ngram_size) == (3, 2, 4)
    assert (translated.min_p, translated.frequency_penalty) == (0.5, 1.5)


def test_several_sequences(translator) -> None:
    assert sampling(translator, num_return_sequences=3).n == 3
    assert params(translator, num_return_sequences=2).n == 2


def test_beams(translator) -> None:
    translated = sampling(translator, 4, num_return_sequences=2, length_penalty=0.5, early_stopping=1)
    assert (translated.use_beam_search, translated.best_of, translated.n, translated.length_penalty) == (
        True,
        4,
        2,
        0.5,
    )
    assert sampling(translator, 3).n == 3
    assert sampling(translator, length_penalty=0.5).length_penalty is None
    with pytest.raises(RuntimeError, match=r"beam_width is 5, must be at most .*max_beam_width, which is 4"):
        sampling(translator, 5)


def test_ends_and_words(translator) -> None:
    tokenizer = translator.words._tokenizer
    several, single = tokenizer.encode("return x").ids, tokenizer.encode("import").ids[:1]
    assert len(several) > 1
    translated = params(translator, end_id=9, stop_words=[several, single], bad_words=[several, single])
    assert (translated.end_id, translated.stop, translated.stop_token_ids) == (9, ["return x"], single)
    assert translated.include_stop_str_in_output
    assert (translated.bad, translated.bad_token_ids) == (["return x"], single)


def test_words_in_unusual_tokens_are_refused(translator) -> None:
    letters = [translator.words._tokenizer.token_to_id(letter) for letter in "def"]
    with pytest.raises(NotImplementedError, match=r"Request\.stop_words .* several tokens are matched as text"):
        params(translator, stop_words=[letters])


def test_outputs(translator) -> None:
    outputs = trtllm.OutputConfig(
        True, True, True, additional_model_outputs=[trtllm.AdditionalModelOutput("hidden", True)]
    )
    translated = params(translator, output_config=outputs)
    assert (translated.logprobs, translated.return_context_logits, translated.return_generation_logits) == (
        0,
        True,
        True,
    )
    assert translated.additional_model_outputs == [executor.AdditionalModelOutput(name="hidden", gather_context=True)]


@pytest.mark.parametrize(
    ("kind", "field"),
    [
        (Guide.REGEX, "regex"),
        (Guide.JSON_SCHEMA, "json"),
        (Guide.EBNF_GRAMMAR, "grammar"),
        (Guide.STRUCTURAL_TAG, "structural_tag"),
    ],
)
def test_guides(translator, kind, field) -> None:
    translated = params(translator, guided_decoding_params=trtllm.GuidedDecodingParams(kind, "x"))
    assert getattr(translated.guided_decoding, field) == "x"


def test_any_json(translator) -> None:
    assert params(
        translator, guided_decoding_params=trtllm.GuidedDecodingParams(Guide.JSON)
    ).guided_decoding.json_object


def test_other_options(translator) -> None:
    request = trtllm.Request(
        [1, 2],
        7,
        streaming=True,
        client_id=5,
        priority=0.9,
        allotted_time_ms=timedelta(seconds=1),
        logits_post_processor_name="mine",
        external_draft_tokens_config=trtllm.ExternalDraftTokensConfig([3, 4]),
        kv_cache_retention_config=trtllm.KvCacheRetentionConfig([Range(0, 2, 30)], 80),
        position_ids=[0, 1],
        pad_id=9,
        cache_salt_id=12,
    )
    translated = translator.translate(request)
    assert (translated.prompt_token_ids, translated.streaming, translated.client_id, translated.priority) == (
        [1, 2],
        True,
        5,
        "high",
    )
    assert (translated.allotted_time_ms, translated.draft_token_ids) == (timedelta(seconds=1), [3, 4])
    assert translated.sampling_params.logits_processor == "mine"
    assert translated.cache_salt == "12"
    assert translated.kv_cache_retention_config.token_range_retention_configs == [
        executor.TokenRangeRetentionConfig(0, 2, 30)
    ]
    assert translated.kv_cache_retention_config.decode_retention_priority == 80
    low = translator.translate(trtllm.Request([1], 1, priority=0.1))
    assert (low.priority, low.cache_salt) == ("low", None)


def test_a_bias(translator) -> None:
    bias = torch.zeros(VOCABULARY)
    bias[3], bias[4], bias[5] = 0.5, -torch.inf, -2.0
    translated = params(translator, embedding_bias=bias, bad_words=[[8]])
    assert (translated.embedding_bias, translated.bad_token_ids, translated.allowed_token_ids) == (
        {3: 0.5, 5: -2.0},
        [8, 4],
        None,
    )
    bias[6] = torch.finfo(torch.float32).max
    assert params(translator, embedding_bias=bias).allowed_token_ids == [6]


@pytest.mark.parametrize("bias", [torch.ones(3), torch.full((VOCABULARY,), torch.nan)])
def test_an_invalid_bias_fails_the_request(translator, bias) -> None:
    translated = params(translator, embedding_bias=bias)
    with pytest.raises(ValueError, match="embedding bias"):
        translated.options()


def test_prompt_tuning(translator) -> None:
    rows = torch.ones(2, 3, dtype=torch.bfloat16)
    config = trtllm.PromptTuningConfig(rows, [0, 9, 9])
    translated = translator.translate(trtllm.Request([1, VOCABULARY, VOCABULARY + 1], 7, prompt_tuning_config=config))
    assert translated.inputs == [1, VOCABULARY, VOCABULARY + 1]
    spec = build_spec(translated.inputs, translated.client_options("id"))
    assert spec.prompt_table.embeddings == pb.Embeddings(shape=[2, 3], dtype="bfloat16", data=b"\x80\x3f" * 6)
    assert list(spec.prompt_table.token_extra_ids) == [0, 9, 9]
    without_extra_ids = trtllm.Request([1], 7, prompt_tuning_config=trtllm.PromptTuningConfig(rows))
    translated, untuned = (translator.translate(request) for request in (without_extra_ids, trtllm.Request([1], 7)))
    assert not build_spec([1], translated.client_options("id")).prompt_table.token_extra_ids
    assert not build_spec([1], untuned.client_options("id")).HasField("prompt_table")


DRAFTS = trtllm.ExternalDraftTokensConfig
GDS = trtllm.KvCacheTransferMode.GDS


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lora_config": trtllm.LoraConfig(1)}, "peft_cache_config is set"),
        ({"multimodal_embedding": torch.ones(2, 2)}, "multimodal_embedding"),
        ({"lookahead_config": trtllm.LookaheadDecodingConfig(3, 5, 7)}, "lookahead_config"),
        ({"encoder_input_token_ids": [1]}, "encoder_input_token_ids"),
        ({"position_ids": [5, 6]}, "position_ids"),
        ({"type": trtllm.RequestType.REQUEST_TYPE_CONTEXT_ONLY}, "request_type"),
        ({"output_config": trtllm.OutputConfig(return_encoder_output=True)}, "return_encoder_output"),
        ({"sampling_config": trtllm.SamplingConfig(top_p_decay=0.5)}, "top_p_decay"),
        ({"sampling_config": trtllm.SamplingConfig(top_p_min=0.5)}, "top_p_min"),
        ({"sampling_config": trtllm.SamplingConfig(2, temperature=0.7)}, "temperature = 0.7: beam search"),
        ({"sampling_config": trtllm.SamplingConfig(beam_width_array=[1])}, "beam_width_array"),
        ({"external_draft_tokens_config": DRAFTS([1], torch.ones(1, 4), fast_logits=True)}, "fast_logits"),
        ({"kv_cache_retention_config": trtllm.KvCacheRetentionConfig([], transfer_mode=GDS)}, "transfer_mode"),
    ],
)
def test_unsupported_options(translator, options, named) -> None:
    with pytest.raises(NotImplementedError, match=named):
        translator.translate(trtllm.Request([1], 1, **options))


def test_drafts_with_logits(translator, caplog) -> None:
    logits = torch.ones(2, 4)
    translated = translator.translate(trtllm.Request([1], 1, external_draft_tokens_config=DRAFTS([3, 4], logits, 0.5)))
    assert (translated.draft_token_ids, translated.draft_logits, translated.acceptance_threshold) == (
        [3, 4],
        logits,
        0.5,
    )
    assert not caplog.records
    # As in TensorRT-LLM, which compares tokens in this case.
    translated = translator.translate(trtllm.Request([1], 1, external_draft_tokens_config=DRAFTS([3, 4], None, 0.5)))
    assert (translated.draft_token_ids, translated.draft_logits, translated.acceptance_threshold) == (
        [3, 4],
        None,
        None,
    )
    assert "acceptance_threshold has no effect" in caplog.text


@pytest.mark.parametrize(
    "arguments",
    [
        ([],),
        ([1], torch.ones(4)),
        ([1], torch.ones(2, 4)),
        ([1], torch.ones(1, 4), 0.0),
        ([1], torch.ones(1, 4), 1.5),
    ],
    ids=str,
)
def test_drafts_that_tensorrt_llm_refuses(arguments) -> None:
    with pytest.raises(RuntimeError):
        DRAFTS(*arguments)


def test_an_unknown_attribute(translator) -> None:
    request = trtllm.Request([1], 1)
    request.max_token = 3
    with pytest.raises(NotImplementedError, match=r"Request\.max_token = 3: unknown option"):
        translator.translate(request)


def test_invalid_params_can_be_replaced_like_others(translator) -> None:
    translated = params(translator, embedding_bias=torch.ones(3))
    with pytest.raises(ValueError, match="embedding bias"):
        replace(translated, max_tokens=1).options()
