"""Rendered chats equal those of transformers' apply_chat_template."""

import json
import shutil

import pytest
from google.protobuf import json_format
from google.protobuf.struct_pb2 import Struct
from transformers import AutoTokenizer

from router.errors import RequestError, Violations
from router.parse.chat import MAX_VARIABLES_DEPTH, ChatPrompt
from router.parse.prompt import parse_prompt
from router.text.chat_template import ChatTemplate, ChatTemplates
from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import open_checkpoint
from sluice.v1 import generation_pb2 as pb
from tests.router.conftest import refused
from tests.router.parse.spec_builders import nested_variables

CHATML = """{% for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{% endfor %}
{% if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{% endif %}"""
LLAMA2 = """{% if messages[0]['role'] == 'system' %}
{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}
{% else %}{% set rest = messages %}{% set system = false %}{% endif %}
{% for message in rest %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{% endif %}
{% if loop.index0 == 0 and system %}{% set content = '<<SYS>>\\n' + system + '\\n<</SYS>>\\n\\n' + message['content'] %}
{% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content | trim + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{{ ' ' + content | trim + ' ' + eos_token }}{% endif %}
{% endfor %}"""
TOOLS = """{%- set ns = namespace(last=messages|length - 1, seen=dict(a=1)) %}
{%- if tools %}{{- '# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson }}{{- "\\n" }}{%- endfor %}
{{- tools | tojson(indent=2) }}{%- endif %}
{%- for message in messages %}
  {%- if message.role == "tool" %}{{- '<tool ' + message.tool_call_id + '>' + message.content + '</tool>' }}
  {%- continue %}{%- endif %}
  {%- if loop.index0 == ns.last %}{{- '[last]' }}{%- endif %}
  {%- if message.content is string %}{{- message.role ~ ': ' ~ message.content ~ '\\n' }}{%- endif %}
  {%- if loop.index > 50 %}{%- break %}{%- endif %}
{%- endfor %}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>' }}{%- endif %}
{%- if budget is defined %}
{{- 'budget ' ~ budget ~ ' of ' ~ limits.tokens ~ ' ' ~ (limits.names | join(',')) }}{%- endif %}
{%- generation %}{{- 'now' if strftime_now('%Y') | length == 4 else 'never' }}{%- endgeneration %}
{%- if add_generation_prompt %}{{- 'assistant:' }}{%- endif %}"""
TRIMMING = "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] | trim }} {% endfor %}{{ pad_token }}"

CHATS = [
    [("user", "Hello")],
    [
        ("system", "Be <b>brief</b> & kind."),
        ("user", "def f(x):\n    pass\n"),
        ("assistant", "ok "),
        ("user", "  more  "),
    ],
    [("user", "a"), ("assistant", "the answer is  ")],
    [("user", "Grüße 😀\t"), ("assistant", "")],
]


@pytest.fixture(scope="module")
def reference(checkpoint):
    return AutoTokenizer.from_pretrained(checkpoint.path, bos_token="<|im_start|>")


def parsed(messages, tools=None, continue_final=False, **variables):
    return pb.ChatPrompt(
        messages=[pb.ChatMessage(role=role, content=text) for role, text in messages],
        tools_json=json.dumps(tools) if tools else "",
        template_kwargs=json_format.ParseDict(variables, Struct()),
        continue_final_message=continue_final,
    )


def prompt_of(chat):
    class Model:
        has_chat = True

    class Limits:
        prompt_bytes = messages = 1_000_000

    bad = Violations()
    prompt = parse_prompt(pb.GenerationSpec(chat=chat), Model, Limits, bad)
    bad.raise_if_any()
    assert isinstance(prompt, ChatPrompt)
    return prompt


def render(source, chat, checkpoint):
    config = checkpoint.tokenizer_config | {"bos_token": {"content": "<|im_start|>"}}
    return ChatTemplate(source, config).render(prompt_of(chat))


def expected(reference, source, messages, tools=None, continue_final=False, **variables):
    variables.setdefault("add_generation_prompt", not continue_final)
    return reference.apply_chat_template(
        [{"role": role, "content": text} for role, text in messages],
        tools=tools,
        chat_template=source,
        tokenize=False,
        continue_final_message=continue_final,
        **variables,
    )


@pytest.mark.parametrize(
    "source", [CHATML, LLAMA2, TOOLS, TRIMMING, None], ids=["chatml", "llama2", "tools", "trim", "own"]
)
@pytest.mark.parametrize("messages", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("continue_final", [False, True])
def test_equal_to_transformers(checkpoint, reference, source, messages, continue_final):
    try:
        expected_text = expected(reference, source, messages, continue_final=continue_final)
    except Exception:  # noqa: BLE001 - a chat that transformers refuses must be refused
        with pytest.raises(RequestError):
            render(source or checkpoint.chat_template, parsed(messages, continue_final=continue_final), checkpoint)
        return
    chat = parsed(messages, continue_final=continue_final)
    assert render(source or checkpoint.chat_template, chat, checkpoint) == expected_text


def test_variables_may_be_nested_as_deeply_as_their_limit(checkpoint):
    chat = pb.ChatPrompt(
        messages=[pb.ChatMessage(role="user", content="x")], template_kwargs=nested_variables(MAX_VARIABLES_DEPTH)
    )
    text = render("{{ a | tojson }}", pb.ChatPrompt.FromString(chat.SerializeToString()), checkpoint)
    assert text.count("{") == MAX_VARIABLES_DEPTH - 1, "the variables themselves are the first level"


def test_tools_and_variables(checkpoint, reference):
    tools = [{"type": "function", "function": {"name": "größe", "parameters": {"type": "object", "n": [1, 2.5, None]}}}]
    variables = {
        "enable_thinking": False,
        "budget": 100,
        "limits": {"tokens": 3, "names": ["a", "b"]},
        "add_generation_prompt": False,
    }
    chat = parsed(CHATS[1], tools, **variables)
    assert render(TOOLS, chat, checkpoint) == expected(reference, TOOLS, CHATS[1], tools, **variables)


def test_tool_responses(checkpoint):
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="tool", content="42", tool_call_id="id-1")])
    assert render(TOOLS, chat, checkpoint).startswith("<tool id-1>42</tool>")


def test_arguments_of_tool_calls_are_objects(checkpoint):
    call = pb.ToolCall(id="id-1", name="weather", arguments_json='{"city": "Köln", "days": 2}')
    message = pb.ChatMessage(role="assistant", tool_calls=[call], reasoning_content="hm", name="helper")
    source = (
        "{% for m in messages %}{{ m.name }} {{ m.reasoning_content }} {% for c in m.tool_calls %}"
        "{{ c.id }} {{ c.type }} {{ c.function.name }} {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    text = render(source, pb.ChatPrompt(messages=[message]), checkpoint)
    assert text == 'helper hm id-1 function weather {"city": "Köln", "days": 2}'


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ raise_exception('unsafe') }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{{ nothing.at.all }}",
        "{{ 1 // 0 }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('no') }}",
    ],
)
def test_messages_that_a_template_rejects_are_the_callers_error(checkpoint, source):
    with pytest.raises(RequestError) as error:
        render(source, parsed(CHATS[0]), checkpoint)
    assert error.value.violations[0].field == "spec.chat"


def test_an_invalid_template_is_an_error_of_the_checkpoint():
    with pytest.raises(CheckpointError, match="line 1"):
        ChatTemplate("{% for", {})


CALL = """{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<call>' }}ARGUMENTS{% endfor %}{% endfor %}"""


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        ("{{ c.function.arguments | tojson }}", '{"a": "ö"}'),
        ("{{ '' + c.function.arguments }}", '{"a": "ö"}'),
        ("{{ c.function.arguments }}", '{"a": "ö"}'),
        ("{% if c.id != 'id-1' %}{{ 1 // 0 }}{% endif %}{{ '' + c.function.arguments }}", '{"a": "ö"}'),
        ("{% for name, value in c.function.arguments | items %}{{ name }}={{ value }}{% endfor %}", "a=ö"),
    ],
    ids=["object", "text", "not Python's text", "text, which the probe cannot find out", "items"],
)
def test_arguments_are_text_for_templates_that_join_them(checkpoint, shown, text):
    call = pb.ToolCall(id="id-1", name="f", arguments_json='{"a": "ö"}')
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="assistant", tool_calls=[call])])
    assert render(CALL.replace("ARGUMENTS", shown), chat, checkpoint) == f"<call>{text}"


@pytest.mark.parametrize("shown", ["{{ c.function.arguments | tojson }}", "{{ '' + c.function.arguments }}"])
def test_a_call_that_was_cut_short_is_shown_as_it_is(checkpoint, shown):
    call = pb.ToolCall(id="id-1", name="f", arguments_json='{"a": "')
    chat = pb.ChatPrompt(messages=[pb.ChatMessage(role="assistant", tool_calls=[call])])
    assert render(CALL.replace("ARGUMENTS", shown), chat, checkpoint) == '<call>{"a": "'


def test_a_template_that_does_not_show_tools_refuses_them(checkpoint):
    with pytest.raises(RequestError, match="does not use tools") as error:
        render(CHATML, parsed(CHATS[0], [{"name": "f"}]), checkpoint)
    assert error.value.violations[0].field == "spec.chat.tools_json"
    with pytest.raises(RequestError, match="does not use tools"):
        render("{% set tools = 1 %}{{ tools }}", parsed(CHATS[0], [{"name": "f"}]), checkpoint)


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
@pytest.mark.parametrize(
    "files",
    [
        {"chat_template.jinja": "file", "additional_chat_templates/tool_use.jinja": "{{ tools[0].function.name }}"},
        {"chat_template.jinja": "file{{ tools }}", "additional_chat_templates/rag.jinja": "rag"},
        {"additional_chat_templates/tool_use.jinja": "{{ tools[0].function.name }}"},
        {"chat_template.jinja": "file{{ tools }}"},
        {},
    ],
    ids=["default and tool_use", "another", "only tool_use", "single", "only the configuration"],
)
@pytest.mark.parametrize("configured", ["of config{{ tools }}", ["default", "tool_use"], ["tool_use"], None])
def test_the_template_that_transformers_chooses(checkpoint, tmp_path, files, configured, tools):
    for file in checkpoint.path.glob("*.json"):
        shutil.copy(file, tmp_path)
    (tmp_path / "additional_chat_templates").mkdir()
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    if isinstance(configured, list):
        configured = [{"name": name, "template": name + "{{ tools }}"} for name in configured]
    config = json.loads((tmp_path / "tokenizer_config.json").read_text()) | {"chat_template": configured}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    opened = open_checkpoint(str(tmp_path))
    templates = ChatTemplates(opened.chat_template, opened.tool_use_template, {}, 1 << 16)
    messages = [{"role": "user", "content": "x"}]
    try:
        text = AutoTokenizer.from_pretrained(tmp_path).apply_chat_template(messages, tools=tools, tokenize=False)
    except ValueError:  # there is no default template
        with pytest.raises(RequestError):
            templates.render(prompt_of(parsed([("user", "x")], tools)))
        return
    assert templates.render(prompt_of(parsed([("user", "x")], tools))) == text


async def test_the_engine_gets_the_ids_of_a_chat(client, ring, reference):
    chat = parsed(CHATS[1])
    await client.events(pb.GenerationSpec(chat=chat))
    ids = reference.apply_chat_template(
        [{"role": role, "content": text} for role, text in CHATS[1]], add_generation_prompt=True, return_dict=False
    )
    assert ring.calls[0].submit.prompt == ids


async def test_a_model_without_a_template(ring, start, checkpoint):
    import dataclasses

    ring.add_engine()
    ring.add_detokenizer()
    client = await start(checkpoint=dataclasses.replace(checkpoint, chat_template=None))
    details = await refused(client.events(pb.GenerationSpec(chat=parsed(CHATS[0]))))
    assert details.fields == ["spec.chat"]
