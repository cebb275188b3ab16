"""`sluice chat`."""

from tests.fakes.server import bad_request


def chats(script) -> list:
    return [
        [(message.role, message.content) for message in request.spec.chat.messages]
        for request in script.seen
        if hasattr(request, "spec")
    ]


def test_history_grows_and_reset_forgets(sluice, script) -> None:
    result = sluice("chat", stdin="one\n\ntwo\n/reset\nthree\n")
    assert result.exit_code == 0
    assert result.stdout == "Hello, world\n" * 3 + "\n"
    answer = ("assistant", "Hello, world")
    assert chats(script) == [[("user", "one")], [("user", "one"), answer, ("user", "two")], [("user", "three")]]


def test_system_message_survives_a_reset(sluice, script) -> None:
    sluice("chat", "--system", "be brief", "--max-tokens", "7", stdin="one\n/reset\ntwo\n")
    assert chats(script) == [[("system", "be brief"), ("user", text)] for text in ("one", "two")]
    assert script.seen[-1].spec.stopping.max_tokens == 7


def test_a_refused_turn_is_told_and_forgotten(sluice, script) -> None:
    script.failure, script.fail_after = bad_request("spec.chat", "is too long"), 0
    result = sluice("chat", stdin="one\ntwo\n")
    assert result.exit_code == 0
    assert result.stderr == "error: spec.chat: is too long\n" * 2
    assert chats(script) == [[("user", "one")], [("user", "two")]]
