"""Runs steps: plain data in, model and sampling, plain data out."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch
from msgspec.structs import replace

from engine_worker.attention.backend import first_line
from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import LoadPlan
from engine_worker.protocol import ImageUsage, Preparation
from engine_worker.runner.batch import to_device, with_images
from engine_worker.runner.compute import SampledDraws, StepComputer, StepDraws, StepWork
from engine_worker.runner.config import use_device
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.finished import Finished
from engine_worker.runner.followers import Followers
from engine_worker.runner.forward import Forward
from engine_worker.runner.launched import LaunchedStep, WaitTimer
from engine_worker.runner.methods import Methods, PendingCall, Poll, refused
from engine_worker.runner.preparations import RequestPreparer
from engine_worker.runner.rows import RequestedRows
from engine_worker.runner.tensors import OutputTensors
from engine_worker.sampling.choose import TORCH, SamplingKernels
from engine_worker.sampling.logit_rules import LogitRules
from engine_worker.sampling.replicas import ReplicatedStep
from engine_worker.step import AdapterLoad, DeviceLostError, Drawn, Move, Slice, Step
from sluice.wire.calls import MethodCall
from sluice.wire.requests import Submit

T = TypeVar("T")


class DraftRunner(NamedTuple):
    """The draft model of a runner."""

    runner: "ModelRunner"
    """Has no thread, and as many blocks as the target model's runner."""
    max_context: int
    """Tokens of the longest sequence that it can compute."""


class ModelRunner:
    """See `engine_worker.protocol.Runner`.

    With overlap a dedicated thread computes the steps, in order; the caller's thread only creates their tensors. On
    CUDA both threads use the same stream, so a step's tensors have arrived before it runs.
    """

    def __init__(
        self,
        forward: Forward[Any, Any],
        overlap: bool = False,
        followers: Followers | None = None,
        kernels: SamplingKernels = TORCH,
        drafter: DraftRunner | None = None,
        extensions: Extensions = NO_EXTENSIONS,
    ) -> None:
        """Raises ValueError if a function of `extensions.output_tensors` cannot be used."""
        cache, device = forward.cache, forward.device
        self.num_blocks = cache.num_blocks
        self.num_host_blocks = cache.num_host_blocks
        self.tokens_per_block = cache.tokens_per_block
        self.window = forward.window
        self.dtype = forward.dtype
        self.exact, self.separates = forward.exact, forward.separates
        self.hidden_size = forward.hidden_size if forward.takes_embeds else 0
        self.choices = {
            "device": str(device),
            "dtype": self.dtype,
            "attention": forward.attention,
            "overlap": str(overlap),
        }
        self.overlap = overlap
        self.adapters = extensions.adapters
        self.pool_file, self.pool_folder = extensions.pool_file, extensions.pool_folder
        if self.pool_file is not None:
            pool = "host" if self.pool_file.layout.on_host else "device"
            self.choices |= {"kv_file": self.pool_file.path, "kv_file_pool": pool}
        self.draft_context = None if drafter is None else drafter.max_context
        self._drafter = None if drafter is None else drafter.runner
        self._images = extensions.images
        self._debug = extensions.debug
        self._replicated = extensions.replicated
        self._output_tensors = OutputTensors.of(forward, extensions.output_tensors)
        self._preparer = RequestPreparer(extensions, forward.vocab_size)
        move_draft_blocks = None if self._drafter is None else self._drafter.move
        self._computer = StepComputer(forward, extensions, kernels, followers, move_draft_blocks, overlap=overlap)
        self._thread = ThreadPoolExecutor(1, "runner", use_device, (device,)) if overlap else None
        self._forward = forward
        self._methods = Methods(forward.rank)
        self._followers = followers
        self._vocab_size = forward.vocab_size
        self._latest: LaunchedStep | None = None
        self._waiting = WaitTimer()
        # One context manager for all steps: creating it takes longer than entering it.
        self._inference = torch.inference_mode()

    @property
    def tensors(self) -> Mapping[str, int]:
        return self._output_tensors.row_bytes

    @property
    def image_rows(self) -> int:
        return 0 if self._images is None else self._images.per_image

    @property
    def image_usage(self) -> ImageUsage | None:
        return None if self._images is None else self._images.usage

    @property
    def waiting_since(self) -> float | None:
        """Start of the launch, collect, draft or check in progress, by time.monotonic; None if idle. If the device
        hangs, these wait without a time limit."""
        return self._waiting.since

    def close(self) -> None:
        """Call after the last step: stops the threads and closes the `Forward`."""
        if self._thread is not None:
            self._thread.shutdown()
        if self.adapters is not None:
            self.adapters.close()
        if self._images is not None:
            self._images.close()
        self._forward.close()
        if self._drafter is not None:
            self._drafter.close()

    def run(self, step: Step) -> list[Drawn]:
        return self.launch(step).collect()

    def check(self) -> None:
        try:
            with self._waiting:
                self._forward.check()
                if self._drafter is not None:
                    self._drafter.check()
        except Exception as error:
            lost = DeviceLostError(f"{self._forward.device} has failed: {first_line(error)}")
            if self._followers is not None:
                self._followers.on_step_failed(lost)
            raise lost from error

    def prepare(self, submit: Submit, *, running: bool = False) -> Preparation | None:
        return None if submit.extras is None else self._preparer.prepare(submit, submit.extras, running=running)

    def logit_rules(self, submit: Submit) -> list[LogitRules | None]:
        guide = None if submit.extras is None else submit.extras.guide
        needed = submit.sampling.has_rules or guide is not None
        return self._preparer.logit_rules(submit, guide) if needed else [None] * submit.n

    def launch(self, step: Step) -> LaunchedStep:
        with self._inference, self._waiting:
            return self._launch(step)

    def draft(self, slices: Sequence[Slice]) -> list[Drawn]:
        if self._drafter is None:
            raise RuntimeError("draft() was called on a runner without a draft model")
        with self._waiting:
            return self._start(self._drafter.run, Step(tuple(slices))).result()

    @torch.inference_mode()
    def move(self, moves: tuple[Move, ...]) -> None:
        """Move blocks immediately, in the caller's thread."""
        self._forward.logits(moves, None)

    def call(self, call: MethodCall) -> PendingCall:
        # All ranks run the method after the same steps, so it may even use the group's collectives.
        others: Poll = list if self._followers is None else self._followers.call(call)
        rank_0 = self._start(self._methods.answer, call) if call.names(0) else None
        return PendingCall(rank_0, others, refused(call, self._forward.rank.num_ranks))

    def _launch(self, step: Step) -> LaunchedStep:
        # Cleared first, so that the step after a failed launch depends on no previous step.
        previous, self._latest = self._latest, None
        arrays = prepared = sampling = rows = debug = None
        if step.slices:
            if self._images is not None:
                step = replace(step, slices=with_images(step.slices, self._images.table))
            sampling = self._plan_sampling(StepDraws.of(step.slices))
            arrays = self._forward.arrays(step.slices)
            prepared = self._forward.prepare(arrays)
            if prepared.has_rows:
                rows = RequestedRows(step.slices, self._forward.device, self._output_tensors.functions)
            if self._debug is not None:
                debug = self._debug.launch(step.slices)
        if prepared is None or not prepared.follows:
            # This step depends on no result of the previous one, so the memory of those results can be freed.
            previous = None
        weights = self._weights(step.loads) if step.loads else ()
        loads = tuple(map(LoadPlan.of, step.loads, weights)) if step.loads else ()
        # Before rank 0 computes: a collective waits for all ranks, so they should start together.
        if self._followers is not None:
            self._followers.send_step(step.moves, arrays, self._replicated_step(sampling), loads)
        work = StepWork(step.moves, loads, weights, prepared, sampling, rows, {}, [], previous, debug)
        # The caller's thread is in inference mode; the runner's thread has to enter it.
        compute = self._computer.compute if self._thread is None else self._computer.compute_in_thread
        results = self._start(compute, work)
        launched = self._latest = LaunchedStep(results, work.missing, rows, work.saved, self._waiting)
        return launched

    def _plan_sampling(self, step_draws: StepDraws) -> SampledDraws | None:
        """Built at the launch: once the step is collected, the engine may change the prompts and outputs that draws
        refer to."""
        if not step_draws.draws:
            return None
        plan = to_device(step_draws.plan(self._vocab_size), self._forward.device)
        sampling = SampledDraws(step_draws.draws, plan)
        if self._thread is not None or step_draws.follows:
            return sampling
        # Request masks before this process occupies all cores, since the guide worker needs one meanwhile.
        return sampling._replace(masks=self._computer.request_masks(sampling, None))

    def _replicated_step(self, sampling: SampledDraws | None) -> ReplicatedStep | None:
        if self._replicated is None:
            return None
        return self._replicated.step(None if sampling is None else sampling.plan.rules)

    def _weights(self, loads: tuple[AdapterLoad, ...]) -> tuple[AdapterWeights, ...]:
        if self.adapters is None:
            raise RuntimeError("a step loads LoRA adapters, but this engine was started without lora = true")
        return tuple(self.adapters.weights(load.version) for load in loads)

    def _start(self, work: Callable[..., T], *arguments: Any) -> "Future[T] | Finished[T]":
        """Do the work in the runner's thread, after the steps launched so far, or now if there is no such thread."""
        if self._thread is not None:
            return self._thread.submit(work, *arguments)
        return Finished.of(work, *arguments)
