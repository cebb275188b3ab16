"""Every field of the .proto changes the spec."""

import asyncio
import uuid
from dataclasses import replace

import msgspec
import pytest

from router.errors import Violations
from router.parse.model import describe, limits_of
from router.parse.parse import UNARY_INTERVAL, new_request_id, parse
from router.requests.part import parse_parts
from router.requests.token_log import RequestLog
from sluice.checkpoint.vision import Vision
from sluice.settings.services import RouterSettings
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import ChatMessage, ChatPrompt, OutputOptions
from sluice.v1.sampling_pb2 import BeamSearch, GuidedDecoding
from sluice.v1.sampling_pb2 import SamplingParams as Sampling
from sluice.wire.adapters import Adapter
from sluice.wire.params import DraftLogits, Guide, GuideKind, SamplingParams, Speculation
from sluice.wire.tables import Table
from tests.fakes.features import make_features
from tests.router.parse.spec_samples import SAMPLES, VOCABULARY


@pytest.fixture(scope="module")
def model(checkpoint):
    return replace(describe(checkpoint), vision=Vision(token_id=1, rows=4))


ADAPTERS = {"sql": Adapter("sql", "0" * 32, "/sql")}
TABLES = {"terse": Table.of(1, 2, "float16", bytes(4))}


def parsed(message, model, streaming=True):
    """The spec, and the parts of the optional features."""
    limits, bad = limits_of(RouterSettings(model="m"), model.max_context_tokens), Violations()
    parts = asyncio.run(parse_parts(make_features(model, limits, ADAPTERS, TABLES), message, model.name, bad))
    spec = parse(message, model, limits, streaming, bad)
    bad.raise_if_any()
    return spec, parts


def spec_of(message, model, streaming=True):
    return parsed(message, model, streaming)[0]


def submitted(parts):
    """What the parts add to the message for the engine."""
    return {name: value for part in parts for name, value in part.submitted(RequestLog(1)).items()}


NESTED = {"chat", "chat.messages", "kv_cache", "output", "resume", "sampling", "speculation", "stopping", "token_ids"}
"""Messages whose fields are listed separately."""


def paths(descriptor, prefix=""):
    for field in descriptor.fields:
        path = prefix + field.name
        if path in NESTED:
            yield from paths(field.message_type, f"{path}.")
        else:
            yield path


def test_every_field_has_a_sample_below():
    assert set(paths(pb.GenerationSpec.DESCRIPTOR)) == SAMPLES.keys() | {"model"}


OFF = [
    {"sampling": Sampling(beam_search=BeamSearch(width=1))},
    {"sampling": Sampling(beam_search=BeamSearch(width=1, length_penalty=1.0, early_stopping=False))},
    {"guided": GuidedDecoding()},
    {"output": OutputOptions(context_logits=False, generation_logits=False, tensors=[])},
    {"lora_id": "", "prompt_adapter_id": "", "model": ""},
    {"speculation": pb.Speculation()},
]


@pytest.mark.parametrize("fields", OFF, ids=str)
def test_an_explicit_off_equals_unset(fields, model):
    request = {"request_id": "r", "text": "t", "n": fields.get("n", 1)}
    seed = Sampling(seed=1)
    message = pb.GenerationSpec(**request, sampling=seed)
    message.MergeFrom(pb.GenerationSpec(**fields))
    assert parsed(message, model) == parsed(pb.GenerationSpec(**request, sampling=seed), model)


def comparable(spec_and_parts, keep):
    spec, parts = spec_and_parts
    values = {name: getattr(spec, name) for name in spec.__slots__}
    if "request_id" not in keep:
        values.pop("request_id")
    if "sampling.seed" not in keep:
        values["sampling"] = msgspec.structs.replace(spec.sampling, seed=0)
    return values, parts


@pytest.mark.parametrize("path", sorted(SAMPLES))
def test_supported_fields_change_the_spec(path, model):
    fields = SAMPLES[path]
    base = {} if {"token_ids", "chat", "prompt_embeds"} & fields.keys() else {"text": "t"}
    if path.startswith("chat."):
        message = ChatMessage(role="assistant")
        base_spec = pb.GenerationSpec(chat=ChatPrompt(messages=[message]))
    else:
        base_spec = pb.GenerationSpec(text="t")
    # A stream cannot choose among outputs that it has already sent.
    streaming = path != "best_of"
    changed = comparable(parsed(pb.GenerationSpec(**(base | fields)), model, streaming), path)
    assert changed != comparable(parsed(base_spec, model, streaming), path)


def test_values_of_the_spec(model):
    message = pb.GenerationSpec(text="t")
    for path, sample in SAMPLES.items():
        if not path.startswith(
            (
                *(
                    "token_ids",
                    "chat",
                    "text",
                    "images",
                    "prompt_",
                    "sampling.allowed",
                    "sampling.beam",
                    "resume.model",
                    "resume.tensor",
                    "lora",
                ),
                *("speculation.draft_logits", "speculation.acceptance"),
            )
        ):
            message.MergeFrom(pb.GenerationSpec(**sample))
    for resume in message.resume:
        resume.model_fingerprint = "a1"
    spec, parts = parsed(message, model)
    assert spec.sampling == SamplingParams(
        temperature=0.0,
        top_k=0,
        top_p=0.5,
        min_p=0.5,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        seed=2**64 - 1,
        logit_bias=((5, -100.0),),
        bad_token_ids=(1, 3),
        no_repeat_ngram_size=3,
        logprobs=0,
    )
    assert submitted(parts) == {
        "guide": Guide(GuideKind.CHOICE, '["yes", "no"]'),
        "speculation": Speculation(0, (1, 2)),
    }
    assert [part.words for part in parts if hasattr(part, "words")] == [("a", "b", "a")]
    assert [part.names for part in parts if hasattr(part, "names")] == [("p", "q")]
    assert spec.client_id == 0
    assert spec.text.stop == ("a", "b")
    assert (spec.text.include_stop, spec.text.min_tokens, spec.text.interval) == (True, 5, 4)
    assert (spec.text.skip_special_tokens, spec.text.keep_special_tokens) == (False, ("<tool_call>",))
    assert spec.stopping.eos_token_ids == ()
    assert (spec.stopping.max_tokens, spec.stopping.min_tokens, spec.stopping.token_ids) == (5, 5, (5,))
    assert (spec.n, spec.priority, spec.salt, spec.time_limit) == (2, 3, "s", 2.5)
    assert (spec.token_ids, spec.echo, spec.timings) == (True, True, True)
    assert spec.keep_prompt_tokens == 3
    assert (spec.resume, spec.resume_model) == ({0: (), 1: (7,)}, "a1")
    assert not spec.prompt.add_special_tokens


def test_draft_logits(model):
    assert model.vocab_size == VOCABULARY
    fields = SAMPLES["speculation.acceptance_threshold"]
    _, parts = parsed(pb.GenerationSpec(text="t", **fields), model)
    logits = DraftLogits("bfloat16", bytes(4 * VOCABULARY))
    assert submitted(parts) == {"speculation": Speculation(None, (1, 2), logits, 0.5)}


@pytest.mark.parametrize(("output_fields", "engine_logprobs"), [({}, 0), ({"logprobs": 3}, 3)])
def test_sequences_to_choose_among_are_sampled_with_logprobs(model, output_fields, engine_logprobs):
    message = pb.GenerationSpec(text="t", n=2, best_of=5, output=OutputOptions(**output_fields))
    spec = spec_of(message, model, streaming=False)
    assert (spec.n, spec.num_outputs, spec.sampling.logprobs) == (5, 2, engine_logprobs)
    assert spec.logprobs == output_fields.get("logprobs")


def test_unset_is_the_models_default(model):
    spec = spec_of(pb.GenerationSpec(text="t"), model)
    assert msgspec.structs.replace(spec.sampling, seed=0) == model.sampling
    assert spec.sampling.temperature == pytest.approx(0.7)
    assert spec.stopping.eos_token_ids == model.eos_token_ids
    assert (spec.n, spec.priority, spec.time_limit, spec.text.interval) == (1, 2, None, 1)
    assert spec.prompt.add_special_tokens
    assert uuid.UUID(spec.request_id).version == 7
    assert spec_of(pb.GenerationSpec(text="t"), model).sampling.seed != spec.sampling.seed


def test_a_unary_request_needs_few_rows(model):
    message = pb.GenerationSpec(text="t", output=OutputOptions(stream_interval=4))
    assert spec_of(message, model, streaming=False).text.interval == UNARY_INTERVAL


def test_top_k_beyond_the_vocabulary_means_no_filter(model):
    message = pb.GenerationSpec(text="t", sampling=Sampling(top_k=2**32 - 1))
    assert spec_of(message, model).sampling.top_k == 0


def test_an_explicit_default_equals_the_default(model):
    sent = Sampling(temperature=0.7, top_p=0.95, top_k=40)
    spec = spec_of(pb.GenerationSpec(text="t", sampling=sent), model)
    assert msgspec.structs.replace(spec.sampling, seed=0) == model.sampling


def test_request_ids_are_uuids_in_order_of_time():
    ids = [new_request_id() for _ in range(1000)]
    assert len(set(ids)) == 1000
    assert {uuid.UUID(request_id).variant for request_id in ids} == {uuid.RFC_4122}
    assert [request_id[:13] for request_id in ids] == sorted(request_id[:13] for request_id in ids)
