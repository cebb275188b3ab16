"""Invalid specs of requests, each with its status and field."""

import math
from struct import pack

from google.protobuf.duration_pb2 import Duration
from google.protobuf.struct_pb2 import Struct
from grpc import StatusCode
from tokenizers import Tokenizer

from sluice import tiny_model
from sluice.ring.tensors import MAX_NAMES
from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import (
    ChatMessage,
    ChatPrompt,
    KvCacheOptions,
    OutputOptions,
    TokenIds,
    TokenRangeRetention,
)
from sluice.v1.sampling_pb2 import BeamSearch, ChoiceList, GuidedDecoding, SamplingParams, StoppingCriteria
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


SPECS = [
    # The prompt.
    ("nothing", pb.GenerationSpec(), INVALID, "spec.prompt"),
    ("empty text", text_spec(""), INVALID, "spec.text"),
    ("huge text", text_spec("x" * 3_000_000), INVALID, "spec.text"),
    ("text beyond the context", text_spec("def " * 3000), INVALID, "spec.text"),
    ("no ids", ids(), INVALID, "spec.token_ids.ids"),
    ("id beyond the vocabulary", ids(1, VOCABULARY), INVALID, "spec.token_ids.ids[1]"),
    ("a million ids", ids(*[5] * 1_000_000), INVALID, "spec.token_ids.ids"),
    ("huge id", ids(HUGE), INVALID, "spec.token_ids.ids[0]"),
    ("ids beyond the context", ids(*[5] * (CONTEXT + 1)), INVALID, "spec.token_ids"),
    ("ids that fill the context", ids(*[5] * CONTEXT), INVALID, "spec.token_ids"),
    ("ids with special tokens", ids(1, add_special_tokens=True), INVALID, "spec.add_special_tokens"),
    ("truncate to nothing", text_spec(truncate_prompt_tokens=0), INVALID, "spec.truncate_prompt_tokens"),
    # A guide.
    ("empty regex", guided(regex=""), INVALID, "spec.guided.regex"),
    ("empty grammar", guided(ebnf=""), INVALID, "spec.guided.ebnf"),
    ("no choices", guided(choice=ChoiceList()), INVALID, "spec.guided.choice.choices"),
    ("an empty choice", guided(choice=ChoiceList(choices=["a", ""])), INVALID, "spec.guided.choice.choices[1]"),
    ("a schema that is no JSON", guided(json_schema="{"), INVALID, "spec.guided.json_schema"),
    ("a schema that is a list", guided(json_schema="[]"), INVALID, "spec.guided.json_schema"),
    ("a schema that is true", guided(json_schema="true"), INVALID, "spec.guided.json_schema"),
    ("a schema too deep", guided(json_schema="[" * 60_000), INVALID, "spec.guided.json_schema"),
    ("a structural tag that is true", guided(structural_tag="true"), INVALID, "spec.guided.structural_tag"),
    ("a long guide", guided(regex="a" * 65_537), INVALID, "spec.guided.regex"),
    # Speculation.
    ("long drafts", speculation(max_draft_tokens=65), INVALID, "spec.speculation.max_draft_tokens"),
    (
        "draft beyond the vocabulary",
        speculation(draft_token_ids=[VOCABULARY]),
        INVALID,
        "spec.speculation.draft_token_ids[0]",
    ),
    (
        "drafts beyond the context",
        speculation(draft_token_ids=[5] * (CONTEXT + 1)),
        INVALID,
        "spec.speculation.draft_token_ids",
    ),
    ("draft logits alone", speculation(draft_logits=draft_logits(2)), INVALID, "spec.speculation.draft_logits"),
    *(
        (
            f"draft logits, {name}",
            speculation(draft_token_ids=[1, 2], draft_logits=logits),
            INVALID,
            f"{DRAFTS}.{field}",
        )
        for name, logits, field in (
            ("empty", pb.DraftLogits(), "draft_logits.dtype"),
            ("doubles", draft_logits(2, dtype="float64"), "draft_logits.dtype"),
            ("too few", draft_logits(1), "draft_logits.data"),
            ("too many", draft_logits(3), "draft_logits.data"),
            ("of another dtype", draft_logits(2, dtype="float32"), "draft_logits.data"),
            ("no whole row", pb.DraftLogits(dtype="float16", data=bytes(5)), "draft_logits.data"),
            ("none", pb.DraftLogits(dtype="float16"), "draft_logits.data"),
        )
    ),
    (
        "draft logits beyond the limit",
        speculation(draft_token_ids=[1] * 1025, draft_logits=draft_logits(1025)),
        INVALID,
        "spec.speculation.draft_logits.data",
    ),
    *(
        (
            f"acceptance threshold {value}",
            speculation(draft_token_ids=[1], draft_logits=draft_logits(1), acceptance_threshold=value),
            INVALID,
            "spec.speculation.acceptance_threshold",
        )
        for value in (0.0, -1.0, 1.01, math.nan, math.inf)
    ),
    (
        "acceptance threshold without draft logits",
        speculation(draft_token_ids=[1], acceptance_threshold=0.5),
        INVALID,
        "spec.speculation.acceptance_threshold",
    ),
    # A chat.
    ("no messages", pb.GenerationSpec(chat=ChatPrompt()), INVALID, "spec.chat.messages"),
    ("unknown role", chat(("user", "a"), ("wizard", "b")), INVALID, "spec.chat.messages[1].role"),
    ("empty role", chat(("", "a")), INVALID, "spec.chat.messages[0].role"),
    ("too many messages", chat(*[("user", "")] * 5000), INVALID, "spec.chat.messages"),
    ("huge chat", chat(("user", "x" * 3_000_000)), INVALID, "spec.chat"),
    ("chat beyond the context", chat(("user", "def " * 3000)), INVALID, "spec.chat"),
    ("tools are no JSON", chat(tools_json="[{"), INVALID, "spec.chat.tools_json"),
    ("tools are no array", chat(tools_json="{}"), INVALID, "spec.chat.tools_json"),
    ("tools are no objects", chat(tools_json="[1]"), INVALID, "spec.chat.tools_json"),
    ("tools too deep", chat(tools_json="[" * 30_000), INVALID, "spec.chat.tools_json"),
    (
        "tool_call_id of a user",
        pb.GenerationSpec(chat=ChatPrompt(messages=[ChatMessage(role="user", tool_call_id="1")])),
        INVALID,
        "spec.chat.messages[0].tool_call_id",
    ),
    (
        "tool calls of a user",
        pb.GenerationSpec(chat=ChatPrompt(messages=[ChatMessage(role="user", tool_calls=[pb.ToolCall(name="f")])])),
        INVALID,
        "spec.chat.messages[0].tool_calls",
    ),
    (
        "reasoning of a user",
        pb.GenerationSpec(chat=ChatPrompt(messages=[ChatMessage(role="user", reasoning_content="r")])),
        INVALID,
        "spec.chat.messages[0].reasoning_content",
    ),
    ("call of no tool", calls(pb.ToolCall()), INVALID, "spec.chat.messages[0].tool_calls[0].name"),
    *[
        (
            f"arguments {text[:8]}",
            calls(pb.ToolCall(name="f", arguments_json=text)),
            INVALID,
            "spec.chat.messages[0].tool_calls[0].arguments_json",
        )
        for text in ("{", "[1]", "1", "null", "[" * 30_000)
    ],
    ("too many calls", calls(*[pb.ToolCall(name="f")] * 5000), INVALID, "spec.chat.messages"),
    ("reserved", chat(template_kwargs=variables(messages=[])), INVALID, "spec.chat.template_kwargs.messages"),
    (
        "two ways on",
        chat(("assistant", "a"), continue_final_message=True, template_kwargs=variables(add_generation_prompt=True)),
        INVALID,
        "spec.chat.continue_final_message",
    ),
    (
        "odd generation prompt",
        chat(template_kwargs=variables(add_generation_prompt="yes")),
        INVALID,
        "spec.chat.template_kwargs.add_generation_prompt",
    ),
    # Sampling.
    *[
        (f"{name} {value}", sampling(**{name: value}), INVALID, f"spec.sampling.{name}")
        for name, values in {
            "temperature": (-0.1, 2.1, 1e30, math.nan, math.inf, -math.inf),
            "top_p": (0.0, -1.0, 1.01, math.nan, math.inf),
            "min_p": (-0.01, 1.01, math.nan),
            "repetition_penalty": (0.0, -1.0, 101.0, math.nan, math.inf),
            "presence_penalty": (-2.1, 2.1, math.nan),
            "frequency_penalty": (-2.1, 2.1, -math.inf),
        }.items()
        for value in values
    ],
    ("bias too large", sampling(logit_bias={7: 101.0}), INVALID, "spec.sampling.logit_bias[7]"),
    ("bias NaN", sampling(logit_bias={7: math.nan}), INVALID, "spec.sampling.logit_bias[7]"),
    ("bias −inf", sampling(logit_bias={7: -math.inf}), INVALID, "spec.sampling.logit_bias[7]"),
    ("bias for no token", sampling(logit_bias={VOCABULARY: 1.0}), INVALID, f"spec.sampling.logit_bias[{VOCABULARY}]"),
    ("many biases", sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), INVALID, "spec.sampling.logit_bias"),
    ("bad id", sampling(bad_token_ids=[1, HUGE]), INVALID, "spec.sampling.bad_token_ids[1]"),
    ("many bad ids", sampling(bad_token_ids=[1] * 16_385), INVALID, "spec.sampling.bad_token_ids"),
    ("all are bad", sampling(bad_token_ids=range(VOCABULARY)), INVALID, "spec.sampling.bad_token_ids"),
    ("allowed id", sampling(allowed_token_ids=[VOCABULARY]), INVALID, "spec.sampling.allowed_token_ids[0]"),
    ("many allowed ids", sampling(allowed_token_ids=[1] * 16_385), INVALID, "spec.sampling.allowed_token_ids"),
    (
        "nothing is left",
        sampling(allowed_token_ids=[1, 2], bad_token_ids=[2, 1]),
        INVALID,
        "spec.sampling.allowed_token_ids",
    ),
    # Stopping.
    ("no tokens", stopping(max_tokens=0), INVALID, "spec.stopping.max_tokens"),
    ("max_tokens beyond the context", stopping(max_tokens=CONTEXT), INVALID, "spec.stopping.max_tokens"),
    ("huge max_tokens", stopping(max_tokens=HUGE), INVALID, "spec.stopping.max_tokens"),
    ("min over max", stopping(max_tokens=4, min_tokens=5), INVALID, "spec.stopping.min_tokens"),
    ("huge min_tokens", stopping(min_tokens=HUGE), INVALID, "spec.stopping.min_tokens"),
    ("min_tokens beyond the room", stopping(min_tokens=CONTEXT), INVALID, "spec.stopping.min_tokens"),
    ("empty stop", stopping(stop=["a", ""]), INVALID, "spec.stopping.stop[1]"),
    ("long stop", stopping(stop=["x" * 1025]), INVALID, "spec.stopping.stop[0]"),
    ("many stops", stopping(stop=[str(i) for i in range(33)]), INVALID, "spec.stopping.stop"),
    ("stop id", stopping(stop_token_ids=[VOCABULARY]), INVALID, "spec.stopping.stop_token_ids[0]"),
    ("many stop ids", stopping(stop_token_ids=[1] * 16_385), INVALID, "spec.stopping.stop_token_ids"),
    # Output.
    ("n is 0", text_spec(n=0), INVALID, "spec.n"),
    ("n is 129", text_spec(n=129), INVALID, "spec.n"),
    ("huge n", text_spec(n=HUGE), INVALID, "spec.n"),
    ("21 logprobs", output(logprobs=21), INVALID, "spec.output.logprobs"),
    ("huge logprobs", output(logprobs=HUGE), INVALID, "spec.output.logprobs"),
    ("interval 0", output(stream_interval=0), INVALID, "spec.output.stream_interval"),
    # The rest.
    ("id with a space", text_spec(request_id="a b"), INVALID, "spec.request_id"),
    ("id not ASCII", text_spec(request_id="é"), INVALID, "spec.request_id"),
    ("id with a newline", text_spec(request_id="a\n"), INVALID, "spec.request_id"),
    ("long id", text_spec(request_id="a" * 129), INVALID, "spec.request_id"),
    ("unknown priority", text_spec(priority=9), INVALID, "spec.priority"),
    ("negative priority", text_spec(priority=-1), INVALID, "spec.priority"),
    ("long salt", text_spec(kv_cache=KvCacheOptions(salt="s" * 257)), INVALID, "spec.kv_cache.salt"),
    # Retention.
    ("empty range", *retention({"start": 3, "end": 3})),
    ("backward range", *retention({"start": 3, "end": 2})),
    ("range to nothing", *retention({"end": 0})),
    ("range beyond the prompt", *retention({"end": 10}, {"start": 10, "end": 11}, field="start", i=1)),
    ("open range beyond the prompt", *retention({"start": HUGE}, field="start")),
    ("range that leaves the prompt", *retention({"start": 9, "end": 11})),
    ("range that leaves the prompt before it is cut", *retention({"end": 11}, truncate_prompt_tokens=5)),
    (
        "range beyond a text",
        text_spec("x", kv_cache=KvCacheOptions(prompt_retention=[TokenRangeRetention(end=HUGE)])),
        INVALID,
        "spec.kv_cache.prompt_retention[0].end",
    ),
    ("overlap", *retention({"start": 4, "end": 8}, {"start": 0, "end": 5}, field="start", i=0)),
    ("overlap with an open one", *retention({"start": 2}, {"start": 8, "end": 9}, field="start", i=1)),
    ("twice the same", *retention({"end": 5}, {"end": 5}, field="start", i=1)),
    ("priority 101", *retention({"priority": 101}, field="priority")),
    ("huge priority", *retention({"priority": HUGE}, field="priority")),
    ("retention for no time", *retention({"duration": Duration()}, field="duration")),
    ("retention for less", *retention({"duration": Duration(seconds=-1)}, field="duration")),
    ("retention for very long", *retention({"duration": Duration(seconds=2_592_001)}, field="duration")),
    ("retention for ever", *retention({"duration": Duration(seconds=2**62)}, field="duration")),
    (
        "many ranges",
        text_spec(kv_cache=KvCacheOptions(prompt_retention=[TokenRangeRetention(end=1)] * 65)),
        INVALID,
        "spec.kv_cache.prompt_retention",
    ),
    ("decode priority", *decode(decode_priority=101)),
    ("decode duration", *decode(decode_duration=Duration())),
    ("long decode duration", *decode(decode_duration=Duration(seconds=2_592_001))),
    # Time.
    ("no time", text_spec(time_limit=Duration()), INVALID, "spec.time_limit"),
    ("negative time", text_spec(time_limit=Duration(seconds=-1)), INVALID, "spec.time_limit"),
    ("huge time", text_spec(time_limit=Duration(seconds=2**62)), INVALID, "spec.time_limit"),
    ("unknown model", text_spec(model="gpt-17"), StatusCode.NOT_FOUND, None),
    ("huge model name", text_spec(model="m" * 1_000_000), StatusCode.NOT_FOUND, None),
    # Not built yet.
    (
        "an unknown processor",
        sampling(logits_processors=["p"]),
        INVALID,
        "spec.sampling.logits_processors[0]",
    ),
    ("many processors", sampling(logits_processors=["p"] * 17), INVALID, "spec.sampling.logits_processors"),
    ("a long name", sampling(logits_processors=["p" * 257]), INVALID, "spec.sampling.logits_processors[0]"),
    ("a choice among resumed outputs", text_spec(best_of=2, resume=[pb.ResumeFrom()]), INVALID, "spec.best_of"),
    ("an empty bad word behind others", sampling(bad_words=["no", "no", ""]), INVALID, "spec.sampling.bad_words[2]"),
    ("an unknown adapter", text_spec(lora_id="l"), StatusCode.NOT_FOUND, "spec.lora_id"),
    ("an adapter of an unknown model", text_spec(lora_id="l", model="m"), StatusCode.NOT_FOUND, None),
    (
        "weights in a request",
        text_spec(lora_weights=pb.LoraWeights(config_json=b"{}", safetensors=b"s")),
        StatusCode.PERMISSION_DENIED,
        "spec.lora_weights",
    ),
    (
        "a fingerprint with no version",
        text_spec(resume=[pb.ResumeFrom(model_fingerprint="a.b")]),
        INVALID,
        "spec.resume[0].model_fingerprint",
    ),
    ("resume of an output beyond n", text_spec(resume=[pb.ResumeFrom(index=1)]), INVALID, "spec.resume[0].index"),
    ("an unknown prompt adapter", text_spec(prompt_adapter_id="p"), StatusCode.NOT_FOUND, "spec.prompt_adapter_id"),
    ("a prompt adapter with a blank", text_spec(prompt_adapter_id="p q"), INVALID, "spec.prompt_adapter_id"),
    ("best_of below n", text_spec(best_of=1, n=2), INVALID, "spec.best_of"),
    ("best_of is 0", text_spec(best_of=0), INVALID, "spec.best_of"),
    ("many to choose from", text_spec(best_of=129), INVALID, "spec.best_of"),
    ("an empty bad word", sampling(bad_words=["no", ""]), INVALID, "spec.sampling.bad_words[1]"),
    ("many bad words", sampling(bad_words=["no"] * 257), INVALID, "spec.sampling.bad_words"),
    ("a long bad word", sampling(bad_words=["n" * 257]), INVALID, "spec.sampling.bad_words[0]"),
    (
        "bad words that are all that is allowed",
        sampling(bad_words=["a"], allowed_token_ids=[TOKENIZER.encode("a").ids[0]]),
        INVALID,
        "spec.sampling.bad_words",
    ),
    ("n-grams of 17", sampling(no_repeat_ngram_size=17), INVALID, "spec.sampling.no_repeat_ngram_size"),
    ("beam search of no width", beams(width=0), INVALID, "spec.sampling.beam_search.width"),
    ("beam search of 129", beams(width=129), INVALID, "spec.sampling.beam_search.width"),
    ("a length penalty", beams(length_penalty=10.5), INVALID, "spec.sampling.beam_search.length_penalty"),
    ("no length penalty", beams(length_penalty=math.nan), INVALID, "spec.sampling.beam_search.length_penalty"),
    ("much diversity", beams(diversity_rate=101), INVALID, "spec.sampling.beam_search.diversity_rate"),
    (
        "both stops",
        beams(early_stopping=True, exhaustive=True),
        INVALID,
        "spec.sampling.beam_search.exhaustive",
    ),
    ("more outputs than beams", text_spec(sampling=BEAMS, n=5), INVALID, "spec.n"),
    ("best_of of beams", text_spec(sampling=BEAMS, best_of=1), INVALID, "spec.best_of"),
    ("beams that resume", text_spec(sampling=BEAMS, resume=[pb.ResumeFrom()]), INVALID, "spec.resume"),
    ("guided beams", text_spec(sampling=BEAMS, guided=GuidedDecoding(regex="a")), INVALID, "spec.guided"),
    (
        "beams with drafts",
        text_spec(sampling=BEAMS, speculation=pb.Speculation(max_draft_tokens=2)),
        INVALID,
        "spec.speculation",
    ),
    (
        "beams with draft logits",
        text_spec(sampling=BEAMS, speculation=pb.Speculation(draft_token_ids=[1], draft_logits=draft_logits(1))),
        INVALID,
        "spec.speculation",
    ),
    (
        "beams with stop strings",
        text_spec(sampling=BEAMS, stopping=StoppingCriteria(stop=["a"])),
        INVALID,
        "spec.stopping.stop",
    ),
    *(
        (
            f"beams with {name}",
            sampling(beam_search=BeamSearch(width=4), **{name: value}),
            INVALID,
            f"spec.sampling.{name}",
        )
        for name, value in {
            "temperature": 0.7,
            "top_k": 4,
            "top_p": 0.5,
            "min_p": 0.5,
            "logits_processors": ["p"],
        }.items()
    ),
    ("a shape of one", *embeds("shape", shape=[4])),
    ("a shape of three", *embeds("shape", shape=[1, 2, 2])),
    ("no rows", *embeds("shape", shape=[0, 2], data=b"")),
    ("huge rows", *embeds("shape", shape=[HUGE, HUGE])),
    ("many narrow rows", *embeds("shape", shape=[1 << 22, 1], data=bytes(8 << 20))),
    ("rows of another size", *embeds("shape", shape=[1, 4])),
    ("rows of integers", *embeds("dtype", dtype="int16")),
    ("rows without a type", *embeds("dtype", dtype="")),
    ("rows that are cut off", *embeds("data", data=bytes(7))),
    ("rows of many bytes", *embeds("data", shape=[4097, 1024], data=bytes(2048 * 4097))),
    ("a value that is not a number", *embeds("data", data=pack("<4e", 0, 0, math.nan, 0))),
    ("an infinite value", *embeds("data", data=pack("<4e", 0, 0, 0, -math.inf))),
    ("an infinite float32", *embeds("data", dtype="float32", data=pack("<4f", 0, math.inf, 0, 0))),
    ("a bfloat16 that is not a number", *embeds("data", dtype="bfloat16", data=b"\0\0\0\0\0\0\xc0\x7f")),
    ("special tokens in embeddings", *embeds(path="add_special_tokens", add_special_tokens=True)),
    ("logprobs of embeddings", *embeds(path="output.prompt_logprobs", output=OutputOptions(prompt_logprobs=0))),
    ("two tables", *embeds(path="prompt_table", prompt_table=table())),
    ("a table without rows", text_spec(prompt_table=pb.PromptTable()), INVALID, "spec.prompt_table.embeddings.shape"),
    ("an id behind the table", ids(5, VOCABULARY + 2, prompt_table=table()), INVALID, "spec.token_ids.ids[1]"),
    ("no id of the table", ids(5, 6, prompt_table=table()), INVALID, "spec.token_ids.ids"),
    (
        "extra ids that are too few",
        ids(5, VOCABULARY, prompt_table=table(7)),
        INVALID,
        "spec.prompt_table.token_extra_ids",
    ),
    ("extra ids of a text", text_spec(prompt_table=table(7)), INVALID, "spec.prompt_table.token_extra_ids"),
    (
        "a text that is cut off",
        text_spec(prompt_table=table(), truncate_prompt_tokens=2),
        INVALID,
        "spec.truncate_prompt_tokens",
    ),
    ("prompt_logprobs of 21", output(prompt_logprobs=21), INVALID, "spec.output.prompt_logprobs"),
    ("a tensor without a name", output(tensors=[pb.TensorSpec()]), INVALID, "spec.output.tensors[0].name"),
    (
        "logits among the named tensors",
        output(tensors=[pb.TensorSpec(name="context_logits")]),
        INVALID,
        "spec.output.tensors[0].name",
    ),
    (
        "a tensor that no engine has",
        output(tensors=[pb.TensorSpec(name="hidden")]),
        INVALID,
        "spec.output.tensors[0].name",
    ),
    (
        "a tensor twice",
        output(tensors=[pb.TensorSpec(name="hidden_states"), pb.TensorSpec(name="hidden_states", context=True)]),
        INVALID,
        "spec.output.tensors[1].name",
    ),
    (
        "more tensors than allowed",
        output(tensors=[pb.TensorSpec(name=str(i)) for i in range(MAX_NAMES + 1)]),
        INVALID,
        "spec.output.tensors",
    ),
    (
        "beams with tensors",
        text_spec(sampling=BEAMS, output=OutputOptions(generation_logits=True)),
        INVALID,
        "spec.sampling.beam_search",
    ),
    (
        "best_of with tensors",
        text_spec(best_of=2, output=OutputOptions(generation_logits=True)),
        INVALID,
        "spec.best_of",
    ),
    (
        "rows of the prompt's tensors that were not requested",
        text_spec(resume_context_rows=1, output=OutputOptions(generation_logits=True)),
        INVALID,
        "spec.resume_context_rows",
    ),
    (
        "more rows of the prompt's tensors than tokens",
        text_spec(resume_context_rows=1000, output=OutputOptions(context_logits=True)),
        INVALID,
        "spec.resume_context_rows",
    ),
    (
        "more rows of an output's tensors than tokens",
        text_spec(
            sampling=SamplingParams(seed=1),
            output=OutputOptions(generation_logits=True),
            resume=[pb.ResumeFrom(token_ids=[7], tensor_rows=2)],
        ),
        INVALID,
        "spec.resume[0].tensor_rows",
    ),
]
