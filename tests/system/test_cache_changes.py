"""Routers learn what engines have cached: one that starts later sends each prompt to the engine that computed it."""

import pytest

from sluice import Client
from sluice.launch import Ring
from sluice.launch.environment import child_environment
from sluice.launch.hosts.process import ChildProcess
from sluice.launch.logs import LogLine
from sluice.launch.plan import PYTHON
from tests.fakes.processes import wait_until

pytestmark = pytest.mark.timeout(300)


class Lines:
    """Collects log lines of routers."""

    def __init__(self) -> None:
        self._lines: list[LogLine] = []

    def __call__(self, line: LogLine) -> None:
        self._lines.append(line)

    def of(self, event: str) -> list[dict]:
        return [line.fields for line in self._lines if line.event == event]

    def engine(self, request_id: str) -> str:
        """The engine that served a request."""
        lines: list[dict] = []

        def logged() -> bool:
            lines[:] = [fields for fields in self.of("request_ended") if fields["request_id"] == request_id]
            return bool(lines)

        assert wait_until(logged)
        return lines[0]["engine"]


@pytest.fixture
def lines():
    return Lines()


@pytest.fixture
def ring(lines):
    with Ring(engines=2, detokenizers=1, observe=lines) as ring:
        yield ring


@pytest.fixture
def second_router(ring):
    """Starts another router for the same engines. Returns its address and its log lines."""
    folder, children, lines = ring._hosts.folder.path, [], Lines()

    def start() -> tuple[str, Lines]:
        engines, detokenizers = (
            ",".join(f"ipc://{folder}/{name}" for name in ring.pids if name.startswith(kind))
            for kind in ("engine-", "detok-")
        )
        flags = ["--model", ring.plan.model, "--name", ring.plan.name, "--id", "late", "--port", "0"]
        flags += ["--listen", f"ipc://{folder}/late", "--engines", engines, "--detokenizers", detokenizers]
        command = [*PYTHON, "-m", "router", *flags]
        children.append(ChildProcess("late", "router", command, child_environment(), lines, lambda _: None))
        assert wait_until(lambda: lines.of("ready"))
        return lines.of("ready")[0]["address"], lines

    yield start
    for child in children:
        child.kill()
        child.wait(60)


def cached_tokens(client: Client, prompt: str, request_id: str) -> int:
    """Send a request. Returns the number of its prompt tokens that were cached."""
    return client.generate(prompt, max_tokens=2, temperature=0.0, request_id=request_id).usage.cached_tokens


@pytest.mark.long
def test_a_router_started_later_sends_prompts_to_the_engines_that_hold_them(ring, lines, second_router):
    prompts: dict[str, str] = {}
    with Client(ring.address, timeout=100) as client:
        assert wait_until(lambda: len(client.stats().engines) == 2)
        while len(prompts) < 6 or len(set(prompts.values())) < 2:
            assert len(prompts) < 64, "all requests go to the same engine"
            prompt = f"# number {len(prompts)}\n" + f"x_{len(prompts)} = [1, 2, 3]\n" * 20
            assert cached_tokens(client, prompt, f"first-{len(prompts)}") == 0
            prompts[prompt] = lines.engine(f"first-{len(prompts)}")
    address, late_lines = second_router()
    with Client(address, timeout=100) as client:
        # The first heartbeat after a Hello contains the whole cache.
        assert wait_until(lambda: len(client.stats().engines) == 2)
        for i, (prompt, engine) in enumerate(prompts.items()):
            assert cached_tokens(client, prompt + "y = 1\n", f"again-{i}") > 0
            assert late_lines.engine(f"again-{i}") == engine
