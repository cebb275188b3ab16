"""Two checkpoints that differ only in their weights, and streams whose model may be replaced."""

import asyncio
import os
import shutil
import signal
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from sluice import AsyncClient, Client, tiny_model
from sluice.client import ModelChanged
from sluice.launch import Ring
from tests.fakes.processes import LIMIT

PROMPT = "def fibonacci(n):\n"
SPEC = {"max_tokens": 480, "ignore_eos": True, "temperature": 0.0}
STREAMS = 4


def make_checkpoints(folder: Path) -> tuple[Path, Path]:
    """The tiny model, and a copy with different weights."""
    old, new = (shutil.copytree(tiny_model.path(), folder / name) for name in ("old", "new"))
    noise = torch.Generator().manual_seed(0)
    tensors = load_file(new / "model.safetensors")
    for tensor in tensors.values():
        tensor += 0.02 * torch.randn(tensor.shape, generator=noise).to(tensor.dtype)
    save_file(tensors, new / "model.safetensors", metadata={"format": "pt"})
    return old, new


def point(model: Path, checkpoint: Path) -> None:
    """Atomically make `model` a link to the checkpoint."""
    link = model.with_name("link")
    link.symlink_to(checkpoint)
    link.replace(model)


class Streams:
    """Several concurrent streams."""

    def __init__(self, client: AsyncClient) -> None:
        self.texts = [""] * STREAMS
        self.errors: list[Exception | None] = [None] * STREAMS
        self.begun = asyncio.Semaphore(0)
        self._tasks = [asyncio.create_task(self._read(client, number)) for number in range(STREAMS)]

    async def _read(self, client: AsyncClient, number: int) -> None:
        chunks = 0
        try:
            async for chunk in client.stream(PROMPT, **SPEC):
                self.texts[number] += chunk.text
                chunks += 1
                if chunks == 5:
                    self.begun.release()
        except ModelChanged as error:
            self.errors[number] = error

    async def until_begun(self) -> None:
        async with asyncio.timeout(LIMIT):
            for _ in range(STREAMS):
                await self.begun.acquire()

    @property
    def running(self) -> int:
        return sum(not task.done() for task in self._tasks)

    async def ended(self) -> None:
        async with asyncio.timeout(2 * LIMIT):
            await asyncio.gather(*self._tasks)


def fingerprints(client: Client) -> dict[str, str]:
    return {engine.engine_id: engine.model_fingerprint for engine in client.stats().engines}


def kill(ring: Ring, engine: str) -> None:
    os.kill(ring.pids[engine], signal.SIGKILL)
