"""Specs with invalid prompts, each with its status and field."""

import math
from struct import pack

from sluice.v1 import generation_pb2 as pb
from sluice.v1.generation_pb2 import ChatMessage, ChatPrompt, OutputOptions
from tests.router.conftest import text_spec
from tests.router.parse.spec_builders import (
    CONTEXT,
    HUGE,
    INVALID,
    VOCABULARY,
    calls,
    chat,
    embeds,
    ids,
    nested_variables,
    table,
    variables,
)

BAD_PROMPTS = [
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
    ("tools deeper than 64", chat(tools_json='[{"a":' * 33 + "1" + "}]" * 33), INVALID, "spec.chat.tools_json"),
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
        for text in ("x", "[1]", "1", "null", "[" * 30_000, '{"a":' * 65 + "1" + "}" * 65)
    ],
    ("too many calls", calls(*[pb.ToolCall(name="f")] * 5000), INVALID, "spec.chat.messages"),
    ("variables too deep", chat(template_kwargs=nested_variables(31)), INVALID, "spec.chat.template_kwargs"),
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
    # Embeddings and prompt tables.
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
]
