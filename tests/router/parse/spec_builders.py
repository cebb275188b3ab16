"""Builders of request specs, and constants, for tests of invalid specs."""

from google.protobuf.struct_pb2 import Struct
from grpc import StatusCode
from tokenizers import Tokenizer

from sluice import tiny_model
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import (
    ChatMessage,
    ChatPrompt,
    KvCacheOptions,
    OutputOptions,
    TokenIds,
    TokenRangeRetention,
)
from sluice.v1.sampling_pb2 import BeamSearch, GuidedDecoding, SamplingParams, StoppingCriteria
from tests.router.conftest import text_spec

TOKENIZER = Tokenizer.from_file(str(tiny_model.path() / "tokenizer.json"))
VOCABULARY = 4096
CONTEXT = 2048
HUGE = 2**32 - 1
DRAFTS = "spec.speculation"
INVALID = StatusCode.INVALID_ARGUMENT
UNBUILT = StatusCode.UNIMPLEMENTED


def sampling(**fields):
    return text_spec(sampling=SamplingParams(**fields))


BEAMS = SamplingParams(beam_search=BeamSearch(width=4))


def beams(width: int = 4, **fields):
    return sampling(beam_search=BeamSearch(width=width, **fields))


def stopping(**fields):
    return text_spec(stopping=StoppingCriteria(**fields))


def output(**fields):
    return text_spec(output=OutputOptions(**fields))


def ids(*tokens, **fields):
    return pb.GenerationSpec(token_ids=TokenIds(ids=tokens), **fields)


def calls(*tool_calls: pb.ToolCall) -> pb.GenerationSpec:
    return pb.GenerationSpec(chat=ChatPrompt(messages=[ChatMessage(role="assistant", tool_calls=tool_calls)]))


def chat(*messages, **fields):
    messages = messages or (("user", "hi"),)
    return pb.GenerationSpec(
        chat=ChatPrompt(messages=[ChatMessage(role=role, content=text) for role, text in messages], **fields)
    )


def rows_of(**fields):
    return pb.Embeddings(**({"shape": [2, 2], "dtype": "float16", "data": bytes(8)} | fields))


def table(*extra_ids):
    return pb.PromptTable(embeddings=rows_of(), token_extra_ids=extra_ids)


def embeds(name: str = "", path: str = "", **fields):
    """A prompt of embeddings, and its invalid field, or the one at `path` of the spec."""
    rows_fields = {key: fields.pop(key) for key in ("shape", "dtype", "data") if key in fields}
    return (
        pb.GenerationSpec(prompt_embeds=rows_of(**rows_fields), **fields),
        INVALID,
        f"spec.{path or f'prompt_embeds.{name}'}",
    )


def variables(**fields):
    struct = Struct()
    struct.update(fields)
    return struct


def nested_variables(levels: int) -> Struct:
    """Variables of a template with this many levels, of which they themselves are the first."""
    struct = inner = Struct()
    for _ in range(levels - 1):
        inner = inner.fields["a"].struct_value
    inner["a"] = 1
    return struct


def retention(*ranges, field="end", i=0, **fields):
    """A prompt of ten tokens with these retention ranges, and the invalid field."""
    options = KvCacheOptions(prompt_retention=[TokenRangeRetention(**token_range) for token_range in ranges])
    return ids(*[5] * 10, kv_cache=options, **fields), INVALID, f"spec.kv_cache.prompt_retention[{i}].{field}"


def decode(**fields):
    return text_spec(kv_cache=KvCacheOptions(**fields)), INVALID, f"spec.kv_cache.{next(iter(fields))}"


def guided(**fields):
    return text_spec(guided=GuidedDecoding(**fields))


def speculation(**fields):
    return text_spec(speculation=pb.Speculation(**fields))


def draft_logits(rows: int, dtype: str = "float16") -> pb.DraftLogits:
    """Valid logits for `rows` draft tokens if the dtype is valid."""
    return pb.DraftLogits(dtype=dtype, data=bytes(rows * VOCABULARY * 2))
