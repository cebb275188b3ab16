"""Thousands of connections, and requests that are never completed: honest requests go on, and memory is bounded."""

import asyncio
import resource
import socket
import struct
import time
from contextlib import ExitStack, closing, contextmanager, suppress

import grpc
import httpx
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.harness.memory import resident_bytes
from sluice.launch import Ring
from sluice.launch.plan import PYTHON
from tests.attacks.damage import Memory, check
from tests.fakes.ports import free_ports

pytestmark = [pytest.mark.long, pytest.mark.process]

CONNECTIONS = 3000
TOKEN = "t" * 32
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with 0 s: closing resets the connection."""
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 8000000\r\n"
AUTHORIZATION = f"authorization: Bearer {TOKEN}\r\n".encode()


@pytest.fixture(scope="module", autouse=True)
def _descriptors():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def ring_with_gateway(tmp_path_factory, **options):
    tokens = tmp_path_factory.mktemp("tokens") / "tokens"
    tokens.write_text(f"{TOKEN} honest\n")
    tokens.chmod(0o600)
    ports = {"port": free_ports(1), "http_port": free_ports(1)}
    with Ring(detokenizers=1, **ports, router_args={"tokens_file": str(tokens)}, **options) as ring:
        yield ring


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
    with ring_with_gateway(tmp_path_factory) as ring:
        yield ring


def address_of(ring: Ring, service: str) -> tuple[str, int]:
    return ("127.0.0.1", ring.plan.port if service == "router" else ring.plan.http_port)


async def first_token(ring: Ring) -> float:
    """Seconds to the first token of an honest client with a new connection to the gateway."""
    body = {"prompt": f"{time.perf_counter_ns()} def area(x):", "max_tokens": 2, "stream": True}
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{ring.plan.http_port}", timeout=60, headers=headers
    ) as http:
        began = time.perf_counter()
        async with http.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    return time.perf_counter() - began
    raise AssertionError("no token")


async def median(ring: Ring, memory: Memory, count: int = 7) -> float:
    seconds = []
    for _ in range(count):
        seconds.append(await first_token(ring))
        memory.sample()
    return sorted(seconds)[count // 2]


async def open_all(stack: ExitStack, address: tuple[str, int], data: bytes = b"", count: int = CONNECTIONS) -> int:
    """Open connections that stay open, and send the start of a request on each. Returns how many were accepted."""
    accepted = 0
    for number in range(count):
        with suppress(OSError):
            connection = stack.enter_context(closing(socket.create_connection(address, timeout=5)))
            accepted += 1
            connection.setblocking(False)
            with suppress(OSError):
                connection.send(data)
        if number % 50 == 0:
            await asyncio.sleep(0)
    return accepted


@pytest.mark.parametrize("service", ["router", "gateway"])
async def test_idle_connections(ring, service):
    memory = Memory(ring.pids)
    await median(ring, memory)
    quiet = await median(ring, memory)
    with ExitStack() as stack:
        accepted = await open_all(stack, address_of(ring, service))
        attacked = await median(ring, memory)
        print(f"{accepted} connections were accepted")
    check(f"idle connections of the {service}", quiet, attacked, memory)


@pytest.mark.parametrize("service", ["router", "gateway"])
async def test_reset_connections(ring, service):
    memory = Memory(ring.pids)
    quiet = await median(ring, memory)

    async def reset_all() -> None:
        for number in range(CONNECTIONS):
            with suppress(OSError), socket.create_connection(address_of(ring, service), timeout=5) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            if number % 10 == 0:
                await asyncio.sleep(0.005)

    attack = asyncio.ensure_future(reset_all())
    attacked = await median(ring, memory)
    await attack
    memory.sample()
    check(f"reset connections of the {service}", quiet, attacked, memory)


@pytest.mark.parametrize(
    ("name", "count", "data"),
    [
        ("bodies without a token", 150, HALF + b"\r\n" + b" " * 4_000_000),
        ("bodies with a wrong token", 150, HALF + b"authorization: Bearer wrong\r\n\r\n" + b" " * 4_000_000),
        ("bodies with a token", 150, HALF + AUTHORIZATION + b"\r\n" + b" " * 4_000_000),
        ("half requests", 2048, HALF + b"\r\n{"),
        ("half heads", 2048, HALF),
    ],
)
async def test_requests_that_are_never_completed(ring, name, count, data):
    """The gateway has one budget of bytes for bodies, with half of what is left for each token or address."""
    memory = Memory(ring.pids)
    await median(ring, memory)
    quiet = await median(ring, memory)

    async def hold() -> None:
        with suppress(OSError):
            _, writer = await asyncio.open_connection(*address_of(ring, "gateway"))
            writer.write(data)
            with suppress(TimeoutError, OSError):
                async with asyncio.timeout(5):
                    await writer.drain()
            await asyncio.sleep(60)

    attack = [asyncio.ensure_future(hold()) for _ in range(count)]
    await asyncio.sleep(3.0)
    attacked = await median(ring, memory)
    for task in attack:
        task.cancel()
    await asyncio.gather(*attack, return_exceptions=True)
    check(name, quiet, attacked, memory)


async def test_20_000_health_checks(ring):
    """On one connection to the router and on one to the gateway."""
    before = {name: resident_bytes(pid) for name, pid in ring.pids.items()}
    async with grpc.aio.insecure_channel(ring.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest(service="liveness")) for _ in range(20_000)]
        answers = await asyncio.gather(*calls)
    assert all(answer.status == health_pb2.HealthCheckResponse.SERVING for answer in answers)
    reader, writer = await asyncio.open_connection(*address_of(ring, "gateway"))
    writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" * 20_000)
    answered = 0
    async with asyncio.timeout(60):
        while answered < 20_000:
            await reader.readuntil(b"HTTP/1.1 200")
            answered += 1
    writer.close()
    assert all(resident_bytes(pid) - before[name] < 300 << 20 for name, pid in ring.pids.items())


async def test_without_free_descriptors(tmp_path_factory):
    """The services say so in the log, and serve new connections again as soon as the flood has ended."""
    lines = []
    python = ("prlimit", "--nofile=700:700", *PYTHON)
    with ring_with_gateway(tmp_path_factory, python=python, observe=lines.append) as ring:
        memory = Memory(ring.pids)
        for service in ("router", "gateway"):
            with ExitStack() as stack:
                await open_all(stack, address_of(ring, service), count=1500)
                memory.sample()
            assert await until_served(ring) < 30
        assert {line.child for line in lines if "few_descriptors" in line.text} >= {"router", "gateway"}
        assert max(memory.growth.values()) < 300 << 20


async def until_served(ring: Ring) -> float:
    """Seconds until a request of an honest client that tries again has its first token."""
    began = time.monotonic()
    while True:
        try:
            await first_token(ring)
        except httpx.TransportError:
            await asyncio.sleep(0.1)
        else:
            return time.monotonic() - began
