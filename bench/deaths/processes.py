"""A ring over TCP whose first engine and first detokenizer are on separate networks, which can be cut off."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from sluice import AsyncClient
from sluice.tiny_model import path

VICTIMS = ("engine-0", "detok-0")
OTHERS = ("engine-1", "detok-1")
KIND = {"engine": "engine_worker", "detok": "detok_service"}
THREADS = 1
START_SECONDS = 300.0
"""Time for all services to start; long, since the machine may be busy."""


class Processes:
    """One router, two engines and two detokenizers.

    `source` is the folder of the services' code, `number` distinguishes rings. `apart` puts the victims into network
    namespaces, which `cut` needs; it requires root.
    """

    def __init__(self, folder: Path, source: Path, number: int, apart: bool) -> None:
        self._folder, self._source, self._number, self._apart = folder, source, number, apart
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self.log = folder / "router.log"
        self.address = f"127.0.0.1:{7100 + number}"

    async def start(self) -> None:
        self._folder.mkdir(parents=True)
        if self._apart:
            self._separate()
        for name in (*VICTIMS, *OTHERS):
            self.begin(name)
        peers = {kind: ",".join(self._listen(f"{kind}-{i}") for i in (0, 1)) for kind in KIND}
        flags = ["--engines", peers["engine"], "--detokenizers", peers["detok"]]
        self._run("router", "router", *flags, "--port", self.address.rpartition(":")[2])
        await self.whole()

    def _separate(self) -> None:
        bridge = f"slp{self._number}"
        _ip(f"link add {bridge} type bridge")
        _ip(f"address add {self._host('router')}/24 dev {bridge}")
        _ip(f"link set {bridge} up")
        for i, victim in enumerate(VICTIMS):
            name, (near, far) = self._namespace(victim), self._wires(i)
            _ip(f"netns add {name}")
            _ip(f"link add {near} type veth peer name {far} netns {name}")
            _ip(f"link set {near} master {bridge} up")
            _ip(f"-n {name} address add {self._host(victim)}/24 dev {far}")
            _ip(f"-n {name} link set {far} up")
            _ip(f"-n {name} link set lo up")

    async def stop(self) -> None:
        for child in self._children.values():
            child.kill()
            child.wait()
        for i, victim in enumerate(VICTIMS if self._apart else ()):
            with suppress(subprocess.CalledProcessError):
                _ip(f"link del {self._wires(i)[0]}")
                _ip(f"netns del {self._namespace(victim)}")
        with suppress(subprocess.CalledProcessError):
            _ip(f"link del slp{self._number}")

    def begin(self, name: str) -> None:
        """Starts an engine or a detokenizer."""
        kind = name.partition("-")[0]
        self._run(name, KIND[kind], *(("--threads", str(THREADS)) if kind == "engine" else ()))

    def send(self, name: str, number: signal.Signals) -> None:
        os.kill(self._children[name].pid, number)

    def cut(self, name: str, down: bool) -> None:
        near = self._wires(VICTIMS.index(name))[0]
        _ip(f"link set {near} {'down' if down else 'up'}")

    async def ended(self, name: str) -> None:
        await asyncio.to_thread(self._children[name].wait)

    async def whole(self) -> None:
        """Waits until the router has heartbeats of all four peers."""
        async with asyncio.timeout(START_SECONDS), AsyncClient(self.address, retry_timeout=START_SECONDS) as client:
            while True:
                stats = await client.stats()
                if (len(stats.engines), len(stats.detokenizers)) == (2, 2):
                    return
                await asyncio.sleep(0.1)

    def given_up(self, since: float) -> dict[str, float]:
        """Maps request ids to the Unix time at which the router first gave up an attempt after `since`."""
        found = [json.loads(line) for line in self.log.read_text().splitlines() if '"attempt_given_up"' in line]
        times = [(line["request_id"], datetime.fromisoformat(line["timestamp"]).timestamp()) for line in found]
        return {request: at for request, at in reversed(times) if at >= since}

    def _run(self, name: str, module: str, *flags: str) -> None:
        inside = ["ip", "netns", "exec", self._namespace(name)] if self._apart and name in VICTIMS else []
        common = ["--model", str(path()), "--id", name, "--listen", self._listen(name), "--insecure-ring"]
        environment = os.environ | {"PYTHONPATH": str(self._source)}
        with (self._folder / f"{name}.log").open("ab") as log:
            self._children[name] = subprocess.Popen(
                [*inside, sys.executable, "-P", "-m", module, *common, *flags],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self._folder,
            )

    def _host(self, name: str) -> str:
        if not self._apart:
            return "127.0.0.1"
        own = VICTIMS.index(name) + 10 if name in VICTIMS else 1
        return f"10.213.{self._number}.{own}"

    def _listen(self, name: str) -> str:
        return f"tcp://{self._host(name)}:{('router', *VICTIMS, *OTHERS).index(name) + 7200 + 10 * self._number}"

    def _namespace(self, name: str) -> str:
        return f"sluice-{self._number}-{name}"

    def _wires(self, victim: int) -> tuple[str, str]:
        return f"slp{self._number}n{victim}", f"slp{self._number}f{victim}"


def _ip(arguments: str) -> None:
    subprocess.run(["ip", *arguments.split()], check=True, capture_output=True)
