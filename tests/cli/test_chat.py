"""`sluice chat`."""

import pytest
from typer.main import get_command

from sluice.cli.chat import KINDS
from sluice.cli.commands import app
from tests.fakes.failures import bad_request


def chats(script) -> list:
    return [
        [(message.role, message.content) for message in request.spec.chat.messages]
        for request in script.seen
        if hasattr(request, "spec")
    ]


def test_history_grows_and_clear_forgets(sluice, script) -> None:
    result = sluice("chat", stdin="one\n\ntwo\n/clear\nthree\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello, world\n" * 3
    answer = ("assistant", "Hello, world")
    assert chats(script) == [[("user", "one")], [("user", "one"), answer, ("user", "two")], [("user", "three")]]


def test_system_message_survives_clear(sluice, script) -> None:
    sluice("chat", "--system", "be brief", "--max-tokens", "7", stdin="one\n/clear\ntwo\n")
    assert chats(script) == [[("system", "be brief"), ("user", text)] for text in ("one", "two")]
    assert script.seen[-1].spec.stopping.max_tokens == 7


def test_a_refused_turn_is_reported_and_forgotten(sluice, script) -> None:
    script.failure, script.fail_after = bad_request("spec.chat", "is too long"), 0
    result = sluice("chat", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr == "error: spec.chat: is too long\n" * 2
    assert chats(script) == [[("user", "one")], [("user", "two")]]


def test_a_model_without_a_chat_template_is_reported_before_the_first_message(sluice, script) -> None:
    script.capabilities = []
    result = sluice("chat", stdin="one\n")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == "error: tiny has no chat template; use sluice generate to complete a prompt instead\n"
    assert chats(script) == []


def test_help_lists_the_commands_and_sends_nothing(sluice, script) -> None:
    result = sluice("chat", stdin="/help\n")
    assert all(command in result.stderr for command in ("/help", "/clear", "/set", "/system", "/exit", "/quit"))
    assert "| sluice chat" in result.stderr
    assert chats(script) == []


@pytest.mark.parametrize("command", ["/exit", "/quit"])
def test_exit_and_quit_end_the_chat(sluice, script, command) -> None:
    result = sluice("chat", stdin=f"one\n{command}\ntwo\n")
    assert (result.exit_code, result.stderr) == (0, "")
    assert chats(script) == [[("user", "one")]]


def test_an_unknown_command_is_reported_and_a_path_is_a_message(sluice, script) -> None:
    result = sluice("chat", stdin="/clera\n/sett temperature 0\n/etc/passwd\n")
    assert result.stderr == (
        "error: unknown command /clera; /help lists the commands. To send it, begin with a space\n"
        "error: unknown command /sett; /help lists the commands. To send it, begin with a space\n"
    )
    assert chats(script) == [[("user", "/etc/passwd")]]


def test_set_and_system_apply_from_the_next_message_on(sluice, script) -> None:
    lines = ["/set temperature 0.5", "/system be brief", "one", "/set temperature default", "/set stop END", "/system"]
    result = sluice("chat", "--temperature", "1", "--top-k", "3", stdin="\n".join([*lines, "two\n"]))
    notes = ["temperature 0.5", "system prompt replaced", "temperature default", "stop 'END'", "no system prompt"]
    assert result.stderr.splitlines() == notes
    answer = ("assistant", "Hello, world")
    assert chats(script) == [[("system", "be brief"), ("user", "one")], [("user", "one"), answer, ("user", "two")]]
    first, second = (request.spec for request in script.seen[-2:])
    assert (first.sampling.temperature, first.sampling.top_k) == (0.5, 3)
    assert (second.sampling.HasField("temperature"), second.sampling.top_k) == (False, 3)
    assert list(second.stopping.stop) == ["END"]


def test_set_shows_all_settings(sluice, script) -> None:
    script.default_sampling.top_p, script.default_sampling.temperature = 0.9, 0.7
    shown = sluice("chat", "--stop", "a b", "--seed", "3", stdin="/set temperature 0.2\n/set\n").stderr.splitlines()
    assert len(shown) == 1 + len(KINDS)
    assert {"top_k default", "top_p 0.9 (default)", "temperature 0.2", "seed 3", "stop 'a b'"} <= set(shown)


@pytest.mark.parametrize(
    ("setting", "error"),
    [
        ("temperature", "temperature needs a value, or default"),
        ("top_k 0.5", "top_k must be an integer or default (got 0.5)"),
        ("min_p all", "min_p must be a number or default (got all)"),
        ("temprature 0", f"unknown setting temprature; the settings are {', '.join(KINDS)}"),
    ],
)
def test_a_wrong_setting(sluice, script, setting, error) -> None:
    assert sluice("chat", stdin=f"/set {setting}\n").stderr == f"error: {error}\n"
    assert chats(script) == []


def test_every_setting_is_an_option_of_the_command_line() -> None:
    chat = get_command(app).commands["chat"]
    assert set(KINDS) < {parameter.name for parameter in chat.params}


def test_errors_name_the_settings(sluice, script) -> None:
    script.failure, script.fail_after = bad_request("spec.sampling.temperature", "is 5.0, must be in [0, 2]"), 0
    result = sluice("chat", stdin="/set temperature 5\none\n")
    assert result.stderr == "temperature 5.0\nerror: temperature: is 5.0, must be in [0, 2]\n"


def test_a_command_takes_no_arguments(sluice, script) -> None:
    result = sluice("chat", stdin="/exit now\n")
    assert result.stderr == "error: /exit must be alone on its line (got /exit now)\n"
    assert chats(script) == []


@pytest.mark.parametrize("line", [" /clear it", " /help", "// a comment", "//TODO"])
def test_a_message_may_begin_with_a_slash(sluice, script, line) -> None:
    assert sluice("chat", stdin=f"{line}\n").stderr == ""
    assert chats(script) == [[("user", line)]]


def test_help_says_how_to_send_a_slash(sluice) -> None:
    assert "Begin a message that starts with such a word with a space." in sluice("chat", stdin="/help\n").stderr
