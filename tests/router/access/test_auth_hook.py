"""The operator's auth function: callers that it names, its failures and timeouts, its use together with tokens."""

import asyncio
import threading

import pytest
from grpc import StatusCode

from router.access.auth_hook import MAX_THREADS, AuthHook, ClientPeer
from router.access.principal import Principal
from router.errors import RequestError
from sluice.v1 import admin_pb2
from tests.router.access.tokens import ALICE, bearer, counts, list_models
from tests.router.conftest import refused, text_spec

PEER = ClientPeer("ipv4:127.0.0.1:1", ())


class RecordingLogger:
    """A logger that records its lines."""

    def __init__(self):
        self.lines = []

    def error(self, event, **fields):
        self.lines.append((event, fields))


def hook(function, seconds=10.0):
    return AuthHook(function, seconds, RecordingLogger())


async def test_the_auth_function_names_the_caller_in_a_thread_or_on_the_loop():
    def plain(metadata, peer):
        assert threading.current_thread().daemon
        return Principal(metadata["user"], admin=peer == PEER)

    async def coroutine(metadata, peer):
        await asyncio.sleep(0)
        return plain_caller(metadata)

    def plain_caller(metadata):
        return Principal(metadata["user"])

    assert await hook(plain).authenticate({"user": "a"}, PEER) == Principal("a", admin=True)
    assert await hook(coroutine).authenticate({"user": "b"}, PEER) == Principal("b")
    assert await hook(lambda metadata, peer: coroutine(metadata, peer)).authenticate({"user": "c"}, PEER) == Principal(
        "c"
    )


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (PermissionError("no"), "hook_refused"),
        (KeyError(ALICE), "hook_failed"),
        (ConnectionError("gone"), "hook_failed"),
        (TimeoutError(), "hook_timeout"),
        (SystemExit(1), "hook_failed"),
        (KeyboardInterrupt(), "hook_failed"),
        (StopIteration(), "hook_failed"),
        (None, "hook_failed"),
        ("alice", "hook_failed"),
    ],
)
async def test_a_failure_of_the_auth_function_only_refuses_the_call(outcome, reason):
    def plain(metadata, peer):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    async def coroutine(metadata, peer):
        return plain(metadata, peer)

    for function in (plain, coroutine):
        auth = hook(function)
        with pytest.raises(RequestError) as error:
            await auth.authenticate({"authorization": ALICE}, PEER)
        assert error.value.metadata["cause"] == reason
        assert ALICE not in str(auth._log.lines)


async def test_an_auth_function_that_never_returns_times_out_and_does_not_block_later_calls():
    go_on = threading.Event()
    stuck = hook(lambda metadata, peer: go_on.wait(60), 0.05)

    async def call_hook():
        with pytest.raises(RequestError, match="in time"):
            await stuck.authenticate({}, PEER)

    threads_before = threading.active_count()
    await asyncio.gather(*(call_hook() for _ in range(3 * MAX_THREADS)))
    assert threading.active_count() - threads_before <= MAX_THREADS
    go_on.set()


async def test_an_auth_function_together_with_tokens(ring, start, tokens, tmp_path, monkeypatch):
    (tmp_path / "gate_keeper.py").write_text(
        "from router.access.principal import Principal\n"
        "async def who(metadata, peer):\n"
        "    if metadata.get('x-user') == 'broken':\n"
        "        raise ValueError(metadata['authorization'])\n"
        "    if 'x-user' not in metadata:\n"
        "        raise PermissionError\n"
        "    assert peer.address.startswith('ipv4:127.0.0.1:') and peer.names == ()\n"
        "    return Principal(metadata['x-user'], admin=metadata['x-user'] == 'chief')\n"
    )
    monkeypatch.chdir(tmp_path)
    ring.add_engine()
    ring.add_detokenizer()
    client = await start(tokens_file=str(tokens), auth="gate_keeper:who")
    await client.generate(text_spec(), metadata=bearer(ALICE))
    await client.generate(text_spec(), metadata=(("x-user", "carol"),))
    assert [line["tenant"] for line in client.lines()] == ["alice", "carol"]
    stats = admin_pb2.GetStatsRequest()
    assert await client.admin.GetStats(stats, metadata=(("x-user", "chief"),))
    assert (await refused(client.admin.GetStats(stats, metadata=(("x-user", "carol"),)))).info.reason == "FORBIDDEN"
    assert (await refused(list_models(client, *bearer("unknown-0123456789")))).code is StatusCode.PERMISSION_DENIED
    details = await refused(list_models(client, *bearer("secret-0123456789", **{"x-user": "broken"})))
    assert (details.code, details.info.metadata["cause"]) == (StatusCode.UNAUTHENTICATED, "hook_failed")
    assert counts(client) == {"not_admin": 1, "hook_refused": 1, "hook_failed": 1}
    assert "secret-0123456789" not in str(client.logs)
