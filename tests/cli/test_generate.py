"""`sluice generate`."""

import re

import grpc
import pytest

from sluice.cli.stream_printer import OutputPrinter, print_stream
from sluice.client import Chunk, FinishReason, SluiceError
from sluice.v1 import generation_pb2, sampling_pb2
from tests.fakes.failures import Failure, bad_request


def test_only_the_text_goes_to_stdout(sluice, script) -> None:
    script.texts = ["def f():", "\n    return 1\n"]
    result = sluice("generate", "x")
    assert result.exit_code == 0
    assert result.stdout == "def f():\n    return 1\n"
    assert result.stderr == ""


def test_a_newline_is_added_to_text_that_does_not_end_with_one(sluice) -> None:
    assert sluice("generate", "x").stdout == "Hello, world\n"


def test_options(sluice, script) -> None:
    result = sluice(
        *("generate", "hi", "--max-tokens", "5", "--temperature", "0", "--seed", "3"),
        *("--stop", "a", "--stop", "b", "--top-k", "4", "--top-p", "0.5", "--echo", "--max-draft-tokens", "0"),
        *("--prompt-logprobs", "2", "--logprobs", "3"),
    )
    assert result.exit_code == 0
    spec = script.seen[-1].spec
    assert spec.text == "hi"
    assert spec.stopping.max_tokens == 5
    assert list(spec.stopping.stop) == ["a", "b"]
    assert spec.sampling.HasField("temperature")
    assert (spec.sampling.temperature, spec.sampling.seed, spec.sampling.top_k, spec.sampling.top_p) == (0, 3, 4, 0.5)
    assert (spec.output.echo, spec.output.prompt_logprobs) == (True, 2)
    assert spec.output.logprobs == 3
    assert spec.speculation == generation_pb2.Speculation(max_draft_tokens=0)


def test_images_become_parts_of_a_chat(sluice, script, tmp_path) -> None:
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(name.encode())
    result = sluice("generate", "see", "--image", str(tmp_path / "a.png"), "--image", str(tmp_path / "b.png"))
    assert result.exit_code == 0
    (message,) = script.seen[-1].spec.chat.messages
    assert message.role == "user"
    assert [part.image.data or part.text for part in message.parts] == [b"a.png", b"b.png", "see"]
    missing = sluice("generate", "see", "--image", str(tmp_path / "c.png"))
    assert missing.exit_code == 2
    assert "c.png cannot be read" in missing.stderr.replace("\n", " ")


def test_chat_sends_the_prompt_as_a_message(sluice, script) -> None:
    assert sluice("generate", "hi", "--chat", "--max-tokens", "5").exit_code == 0
    spec = script.seen[-1].spec
    assert [(message.role, message.content) for message in spec.chat.messages] == [("user", "hi")]
    assert spec.stopping.max_tokens == 5


@pytest.mark.parametrize(
    ("texts", "capabilities", "arguments", "hints"),
    [
        ([""], ["chat"], [], True),
        ([""], [], [], False),
        ([""], ["chat"], ["--chat"], False),
        (["x"], ["chat"], [], False),
    ],
)
def test_an_empty_output_of_an_instruct_model_has_a_hint(sluice, script, texts, capabilities, arguments, hints) -> None:
    script.texts, script.capabilities = texts, capabilities
    result = sluice("generate", "hi", *arguments)
    assert result.exit_code == 0
    hint = "the model ended its output at once; it has a chat template, and --chat sends the prompt with it\n"
    assert result.stderr == (hint if hints else "")


def test_unset_options_stay_unset(sluice, script) -> None:
    sluice("generate", "hi")
    spec = script.seen[-1].spec
    assert (spec.sampling.ListFields(), spec.stopping.ListFields()) == ([], [])
    # A broken stream is resumed from its token ids.
    assert spec.output == generation_pb2.OutputOptions(token_ids=True)


@pytest.mark.parametrize(
    ("arguments", "guide"),
    [
        (["--json-schema", "FILE"], {"json_schema": "{}"}),
        (["--json"], {"json_object": {}}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--grammar", "FILE"], {"ebnf": "{}"}),
        (["--choice", "yes", "--choice", "no"], {"choice": {"choices": ["yes", "no"]}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("n", [1, 2])
def test_a_guide(sluice, script, tmp_path, arguments, guide, n) -> None:
    file = tmp_path / "guide"
    file.write_text("{}")
    options = [str(file) if argument == "FILE" else argument for argument in arguments]
    assert sluice("generate", "hi", "--n", str(n), *options).exit_code == 0
    assert script.seen[-1].spec.guided == sampling_pb2.GuidedDecoding(**guide)


def test_several_outputs_are_printed_under_their_index(sluice, script) -> None:
    result = sluice("generate", "hi", "--n", "2")
    assert result.exit_code == 0
    assert script.seen[-1].spec.n == 2
    assert result.stdout == "==> 0 <==\nHello, world\n\n==> 1 <==\nHello, world\n"


@pytest.mark.parametrize("n", ["0", "-1", "many"])
def test_an_invalid_number_of_outputs_is_refused(sluice, script, n) -> None:
    result = sluice("generate", "hi", "--n", n)
    assert result.exit_code == 2
    assert "--n" in result.stderr
    assert not script.seen


def test_the_first_unfinished_output_is_streamed_and_later_ones_are_buffered(capsys) -> None:
    printer = OutputPrinter(3)

    def printed(index: int, text: str, finish_reason: FinishReason | None = None) -> str:
        printer.add(Chunk(index, text, finish_reason=finish_reason))
        return capsys.readouterr().out

    assert printed(1, "b") == "==> 0 <==\n"
    assert printed(0, "a") == "a"
    assert printed(2, "c\n") == ""
    assert printed(1, "B", FinishReason.EOS) == ""
    assert printed(0, "A") == "A"
    assert printed(0, "", FinishReason.LENGTH) == "\n\n==> 1 <==\nbB\n\n==> 2 <==\nc\n"
    assert printed(2, "C", FinishReason.EOS) == "C"
    printer.close()
    assert capsys.readouterr().out == "\n"
    assert printer.texts == ["aA", "bB", "c\nC"]


def test_buffered_outputs_are_printed_if_the_stream_breaks(capsys) -> None:
    class BrokenStream:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __iter__(self):
            yield Chunk(0, text="a")
            yield Chunk(2, text="c")
            raise SluiceError("the router was lost")

    with pytest.raises(SluiceError):
        print_stream(BrokenStream, 3)
    assert capsys.readouterr().out == "==> 0 <==\na\n\n==> 2 <==\nc\n"


def test_several_guides_are_refused(sluice, script) -> None:
    result = sluice("generate", "hi", "--json", "--regex", "a")
    assert result.exit_code == 2
    assert "only one of" in result.stderr
    assert not script.seen


def test_a_guide_that_cannot_be_read(sluice, tmp_path) -> None:
    result = sluice("generate", "hi", "--json-schema", str(tmp_path / "missing"))
    assert result.exit_code == 2
    assert "missing cannot be read: No such file or directory" in " ".join(result.stderr.split())


def test_a_schema_that_is_not_json_is_reported_with_its_place(sluice, script, tmp_path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{\n  "type": "object",\n  }\n')
    result = sluice("generate", "hi", "--json-schema", str(file))
    assert result.exit_code == 2
    # Python 3.13 has another text for a comma too many.
    place = re.escape(str(file)) + r":(3:3: Expecting property name enclosed in double quotes|2:19: Illegal trailing )"
    assert re.search(place, result.stderr)
    assert not script.seen


def test_a_prompt_without_quotes_is_refused_with_a_hint(sluice, script) -> None:
    result = sluice("generate", "def", "f(x):", "--seed", "3")
    assert result.exit_code == 2
    assert "the prompt must be one argument: put it in quotes, as in 'def f(x):'" in result.stderr
    assert not script.seen


def test_prompt_from_stdin(sluice, script) -> None:
    sluice("generate", "-", stdin="from a pipe")
    assert script.seen[-1].spec.text == "from a pipe"


def test_a_refused_request_is_reported_in_one_line(sluice, script) -> None:
    script.failure = bad_request("spec.sampling.top_p", "is 5,\nmust be in (0, 1]")
    result = sluice("generate", "x", "--top-p", "5")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: --top-p: is 5, must be in (0, 1]\n"


def test_a_value_that_cannot_be_sent_is_reported_in_one_line(sluice) -> None:
    result = sluice("generate", "x", "--max-tokens", "-1")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: --max-tokens")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", [["generate", "x"], ["health"], ["chat"]])
def test_no_server(sluice, command) -> None:
    result = sluice(*command, "--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: no Sluice server answers at 127.0.0.1:1 (Connection refused); start one with: sluice serve\n"
    )


def test_a_lost_engine_is_not_reported_as_a_missing_server(sluice, script) -> None:
    from google.rpc import error_details_pb2

    info = error_details_pb2.ErrorInfo(reason="ENGINE_LOST", domain="sluice")
    script.failure = Failure(grpc.StatusCode.UNAVAILABLE, "the engine is lost", (info,))
    result = sluice("generate", "x")
    assert result.exit_code == 1
    assert result.stderr == "error: the engine is lost\n"
