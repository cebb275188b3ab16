"""Computes steps: tensors in, the model, sampling, plain data out."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch

from engine_worker.attention.refusal import synchronize
from engine_worker.models.windows import widest
from engine_worker.runner.arrays import Arrays
from engine_worker.runner.batch import Batch, build
from engine_worker.runner.forward import Forward, Prepared
from engine_worker.runner.results import Results
from engine_worker.runner.transfer import send
from engine_worker.sampling.gumbel_max import Race, by_torch
from engine_worker.sampling.sampler import Plan, sample
from engine_worker.step import DeviceLostError, Drawn, Move, Step

Work = Callable[[], Results | None]


class Ranks(Protocol):
    """The other ranks of a group, which compute what this one does."""

    def tell(self, moves: tuple[Move, ...], arrays: Arrays | None) -> None:
        """Have them compute a step."""
        ...

    def lose(self, error: Exception) -> None:
        """This one failed at a step that they were told of: the group is out of step."""
        ...


def _use(device: torch.device) -> None:
    """The current device is each thread's own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


class Waiting:
    """Since when the engine's thread has been waiting in here. Other threads may look."""

    def __init__(self) -> None:
        self.since: float | None = None
        """By time.monotonic; None: it is not."""

    def __enter__(self) -> None:
        self.since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.since = None


class Running:
    """A step on its way; see `engine_worker.step.Launched`."""

    def __init__(self, results: "Future[Results | None]", waiting: Waiting) -> None:
        self._results = results
        self._waiting = waiting

    def collect(self) -> list[Drawn]:
        """See `Launched.collect`."""
        with self._waiting:
            results = self._results.result()
            return [] if results is None else results.drawn()

    def sampled(self) -> torch.Tensor | None:
        """Its tokens, [D] int64 on the device, once it was computed; None where it failed or drew nothing."""
        results = None if self._results.exception() is not None else self._results.result()
        return None if results is None else results.tokens


class ModelRunner:
    """A model, its KV cache and an attention backend; see `engine_worker.step.Runner`.

    With overlap a thread of its own works the steps off, in order; only their tensors are made in the caller's. On
    CUDA both put their work into the same stream, so a step's tensors are there before it runs.
    """

    def __init__(
        self,
        forward: Forward,
        overlap: bool = False,
        ranks: Ranks | None = None,
        synchronize: Callable[[torch.device], None] = synchronize,
        race: Race = by_torch,
    ) -> None:
        """`synchronize` waits for the device and raises where it has failed. `race` draws from the
        whole vocabulary."""
        cache, device = forward.cache, forward.device
        self.num_blocks = cache.num_blocks
        self.num_host_blocks = cache.num_host_blocks
        self.tokens_per_block = cache.tokens_per_block
        self.window = widest(forward.model.config.windows)
        self.dtype = str(cache.layers[0].keys.dtype).removeprefix("torch.")
        self.choices = {
            "device": str(device),
            "dtype": self.dtype,
            "attention": forward.backend.name,
            "overlap": str(overlap),
        }
        self.overlap = overlap
        self._thread = ThreadPoolExecutor(1, "runner", _use, (device,)) if overlap else None
        self._forward = forward
        self._ranks = ranks
        self._race = race
        self._wait_for = synchronize
        self._vocab_size = forward.model.config.vocab_size
        self._waits = device.type == "cpu"
        """Whether sampling may wait for the device: on a CPU there is nothing to wait for."""
        self._latest: Running | None = None
        self._waiting = Waiting()

    @property
    def waiting_since(self) -> float | None:
        """Since when a launch, a collect or a check has not come back, by time.monotonic; None: nobody waits. On a
        device that hangs they wait without limit."""
        return self._waiting.since

    def close(self) -> None:
        """After the last step: end the thread, then what `Forward.close` ends."""
        if self._thread is not None:
            self._thread.shutdown()
        self._forward.close()

    def run(self, step: Step) -> list[Drawn]:
        """Launch and collect."""
        return self.launch(step).collect()

    def check(self) -> None:
        """See `Runner.check`. After an illegal access, a failed assert or a memory fault CUDA gives the same error to
        every call of this process, for ever."""
        try:
            with self._waiting:
                self._wait_for(self._forward.device)
        except Exception as error:
            said = str(error).partition("\n")[0]
            lost = DeviceLostError(f"{self._forward.device} answers no more: {said}")
            if self._ranks is not None:
                self._ranks.lose(lost)
            raise lost from error

    @torch.inference_mode()
    def launch(self, step: Step) -> Running:
        """See `Runner.launch`."""
        with self._waiting:
            return self._launch(step)

    def _launch(self, step: Step) -> Running:
        before, self._latest = self._latest, None
        batch = prepared = plan = None
        if step.slices:
            batch = build(step.slices, self.tokens_per_block, self.window)
            prepared = self._forward.prepare(batch.arrays)
            if batch.draws:
                plan = send(batch.plan(self._vocab_size), self._forward.device)
        if prepared is None or not prepared.follows:
            before = None
        if self._ranks is not None:
            self._ranks.tell(step.moves, None if batch is None else batch.arrays)
        results = self._start(lambda: self._compute(step.moves, batch, prepared, plan, before))
        self._latest = Running(results, self._waiting)
        return self._latest

    def _start(self, work: Work) -> "Future[Results | None]":
        if self._thread is not None:
            return self._thread.submit(work)
        done: Future[Results | None] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - told when the step is collected, as it is with overlap
            done.set_exception(error)
        return done

    @torch.inference_mode()
    def _compute(
        self,
        moves: tuple[Move, ...],
        batch: Batch | None,
        prepared: Prepared | None,
        plan: Plan | None,
        before: Running | None,
    ) -> Results | None:
        try:
            sampled = before.sampled() if before is not None else None
            if sampled is not None and prepared is not None:
                prepared.tensors.follow(sampled)
            logits = self._forward.logits(moves, prepared)
        except Exception as error:
            if self._ranks is not None:
                self._ranks.lose(error)
            raise
        if batch is None or plan is None or logits is None:
            return None
        drawn = sample(logits, plan, sampled, widen=self._waits, race=self._race)
        results = Results(drawn, batch.draws, hidden=self.overlap)
        # Looked at when all of the step is queued: the device runs dry only until the next one is queued too.
        if not results.short():
            return results
        return Results(sample(logits, plan, sampled, race=self._race), batch.draws, hidden=self.overlap)
