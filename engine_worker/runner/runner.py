"""Computes steps: plain data in, model, sampling, plain data out."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import torch
from msgspec.structs import replace
from torch import Tensor

from engine_worker.attention.backend import first_line
from engine_worker.guided.guides import Guides, refused_guide
from engine_worker.guided.masks import GuidedSequence
from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import LoadPlan
from engine_worker.lora.library import AdapterLibrary
from engine_worker.protocol import ImageUsage, Preparation
from engine_worker.runner.batch import StepArrays, to_device
from engine_worker.runner.calls import PendingCall, Poll, refused
from engine_worker.runner.debug_tensors import DebugStep, DebugTensors
from engine_worker.runner.draws import SampledDraws, StepDraws
from engine_worker.runner.finished import Finished
from engine_worker.runner.forward import Forward, PreparedStep, ignore_rows
from engine_worker.runner.launched import LaunchedStep, WaitTimer
from engine_worker.runner.methods import Methods
from engine_worker.runner.preparations import Preparations
from engine_worker.runner.results import StepResults
from engine_worker.runner.rows import WantedRows
from engine_worker.runner.table_rows import with_images
from engine_worker.runner.tensors import OutputTensors
from engine_worker.sampling.fused import TORCH, SamplingKernels
from engine_worker.sampling.guided_draws import AskedMasks
from engine_worker.sampling.processors import Processors
from engine_worker.sampling.program import Processing, Program, build_programs
from engine_worker.sampling.replicas import ReplicatedSequences, ReplicatedStep
from engine_worker.sampling.sampler import NO_PROGRAMS, ProgramResults, SamplingPlan, sample
from engine_worker.step import AdapterLoad, DeviceLostError, Drawn, Move, Slice, Step
from engine_worker.vision.rows import ImageRows
from sluice.ring.calls import MethodCall
from sluice.ring.wire import Submit

T = TypeVar("T")


class Followers(Protocol):
    """The other ranks of a tensor-parallel group, which compute every step along with rank 0."""

    def send_step(
        self,
        moves: tuple[Move, ...],
        arrays: StepArrays | None,
        processed: ReplicatedStep | None,
        loads: tuple[LoadPlan, ...] = (),
    ) -> None:
        """Have them compute a step; no arrays: moves only. If `processed` has rows, `send_rows` follows once rank 0 has
        the logits. `loads`: of adapters, before the step."""

    def send_rows(self, logits: Tensor, followed: Sequence[int]) -> None:
        """Have them call the processors; see `ReplicatedProcessors.run`."""

    def call(self, call: MethodCall) -> Poll:
        """Have those that it names run a method; returns what asks for their answers, by rank."""

    def on_step_failed(self, error: Exception) -> None:
        """Rank 0 failed at a step that they were sent: the group is out of step."""


def _use(device: torch.device) -> None:
    # CUDA's current device is a property of the thread.
    if device.type == "cuda":
        torch.cuda.set_device(device)


class ModelRunner:
    """See `engine_worker.protocol.Runner`.

    With overlap a thread of its own computes the steps, in order; the caller's thread only creates their tensors. On
    CUDA both use the same stream, so a step's tensors have arrived before it runs.
    """

    def __init__(
        self,
        forward: Forward[Any, Any],
        overlap: bool = False,
        followers: Followers | None = None,
        kernels: SamplingKernels = TORCH,
        drafter: "tuple[ModelRunner, int] | None" = None,
    ) -> None:
        """`drafter`: the draft model, without a thread of its own, with as many blocks, and the tokens of the longest
        sequence that it can compute."""
        cache, device = forward.cache, forward.device
        self.num_blocks = cache.num_blocks
        self.num_host_blocks = cache.num_host_blocks
        self.tokens_per_block = cache.tokens_per_block
        self.window = forward.window
        self.dtype = forward.dtype
        self.hidden_size = forward.hidden_size if forward.takes_embeds else 0
        self.choices = {
            "device": str(device),
            "dtype": self.dtype,
            "attention": forward.attention,
            "overlap": str(overlap),
        }
        self.overlap = overlap
        self._drafter = None if drafter is None else drafter[0]
        self.draft_context = None if drafter is None else drafter[1]
        self.processors = Processors()
        """Those that requests may name; set before the first step."""
        self.replicated: ReplicatedSequences | None = None
        """None: the other ranks call no processors. Set before the first step."""
        self.output_tensors = OutputTensors.of(forward, {})
        """Those that requests may name; set before the first request."""
        self.debug: DebugTensors | None = None
        """None: no arrays are written. Set before the first step."""
        self.guides: Guides | None = None
        """None: guides are refused. Set before the first request."""
        self.adapters: AdapterLibrary | None = None
        """None: LoRA adapters are refused. Set before the first request."""
        self.images: ImageRows | None = None
        """None: the model takes no images. Set before the first request."""
        self._thread = ThreadPoolExecutor(1, "runner", _use, (device,)) if overlap else None
        self._forward = forward
        self._methods = Methods(forward.rank)
        self._followers = followers
        self._kernels = kernels
        self._vocab_size = forward.vocab_size
        # On a CPU results are there at once, so sampling may look at them and widen its candidates by itself.
        self._widen = device.type == "cpu"
        self._masks_first = device.type == "cpu"
        """Whether the tokens of the step before are there before the model is queued."""
        self._latest: LaunchedStep | None = None
        self._waiting = WaitTimer()
        # One for all steps: making it takes longer than entering it.
        self._inference = torch.inference_mode()

    @property
    def tensors(self) -> Mapping[str, int]:
        return self.output_tensors.row_bytes

    @property
    def image_rows(self) -> int:
        return 0 if self.images is None else self.images.per_image

    @property
    def image_usage(self) -> ImageUsage | None:
        return None if self.images is None else self.images.usage

    def find_tensors(self, names: Mapping[str, str]) -> None:
        """Offer what these functions return; see `OutputTensors.of`."""
        self.output_tensors = OutputTensors.of(self._forward, names)

    @property
    def waiting_since(self) -> float | None:
        """When the launch, collect or check in progress began, by time.monotonic; None if idle. If the device hangs
        they wait without limit."""
        return self._waiting.since

    def close(self) -> None:
        """After the last step: ends the thread, then closes `Forward`."""
        if self._thread is not None:
            self._thread.shutdown()
        if self.adapters is not None:
            self.adapters.close()
        if self.images is not None:
            self.images.close()
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

    def prepare(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        if running:
            # It holds all else that it needs.
            return self._prepare_guide(spec, running=True)
        parts = [self._prepare_guide(spec)]
        if spec.adapter is not None and self.adapters is not None:
            parts.append(self.adapters.prepare(spec.adapter))
        if spec.tables.images and self.images is not None:
            parts.append(self.images.prepare(spec.tables.images))
        needed = [part for part in parts if part is not None]
        return Preparations(needed, self._advance) if needed else None

    def _prepare_guide(self, spec: Submit, *, running: bool = False) -> Preparation | None:
        if spec.guide is None:
            return None
        if self.guides is None:
            return refused_guide(spec.guide)
        return self.guides.prepare(spec.guide, recovered=running or bool(spec.attempt or spec.resume))

    def _advance(self) -> None:
        """All preparations."""
        if self.guides is not None:
            self.guides.advance()
        if self.adapters is not None:
            self.adapters.advance()
        if self.images is not None:
            self.images.advance()

    def programs(self, spec: Submit) -> list[Program | None]:
        guided: list[GuidedSequence] = []
        if spec.guide is not None and self.guides is not None:
            ends = spec.stopping.eos_token_ids + spec.stopping.stop_token_ids
            guided = self.guides.sequences(spec.guide, ends, spec.n)
        return build_programs(spec.sampling, spec.prompt, Processing.of(spec), self._vocab_size, guided)

    def launch(self, step: Step) -> LaunchedStep:
        with self._inference, self._waiting:
            return self._launch(step)

    def draft(self, slices: Sequence[Slice]) -> list[Drawn]:
        drafter = self._drafter
        if drafter is None:
            raise RuntimeError("there is no draft model")
        # Guides are set after loading.
        drafter.guides = self.guides
        with self._waiting:
            return self._start(drafter.run, Step(tuple(slices))).result()

    def call(self, call: MethodCall) -> PendingCall:
        # The others get it after the same steps as rank 0, so a method may even use the group's collectives.
        others: Poll = list if self._followers is None else self._followers.call(call)
        own = self._start(self._methods.answer, call) if call.names(0) else None
        return PendingCall(own, others, refused(call, self._forward.rank.num_ranks))

    def _launch(self, step: Step) -> LaunchedStep:
        # Cleared first, so that a step after a failed launch follows none.
        before, self._latest = self._latest, None
        arrays = prepared = sampling = rows = debugged = None
        if step.slices:
            if self.images is not None:
                step = replace(step, slices=with_images(step.slices, self.images.table))
            sampling = self._sampling(StepDraws.of(step.slices))
            arrays = self._forward.arrays(step.slices)
            prepared = self._forward.prepare(arrays)
            if prepared.has_rows:
                rows = WantedRows(step.slices, self._forward.device, self.output_tensors.functions)
            if self.debug is not None:
                debugged = self.debug.launch(step.slices)
        if prepared is None or not prepared.follows:
            # Nothing in this step depends on the previous one's results, so their memory need not be kept.
            before = None
        weights = self._weights(step.loads) if step.loads else ()
        plans = tuple(map(LoadPlan.of, step.loads, weights)) if step.loads else ()
        # Before rank 0 computes: a collective waits for all ranks, so they should start together.
        if self._followers is not None:
            self._followers.send_step(step.moves, arrays, self._replicated_step(sampling), plans)
        missing: dict[int, str] = {}
        # The caller's thread is in inference mode.
        run = self._compute if self._thread is None else self._compute_in_thread
        results = self._start(run, step.moves, plans, weights, prepared, sampling, rows, missing, before, debugged)
        launched = self._latest = LaunchedStep(results, missing, rows, self._waiting)
        return launched

    def _sampling(self, work: StepDraws) -> SampledDraws | None:
        """Built at the launch: the engine may change the prompts and outputs that draws refer to once the step is
        collected."""
        if not work.draws:
            return None
        sampling = SampledDraws(work.draws, to_device(work.plan(self._vocab_size), self._forward.device))
        if self._thread is not None or work.follows:
            return sampling
        # Before this process uses all cores: the guide worker has one of them meanwhile.
        return sampling._replace(masks=self._ask_masks(sampling, None))

    def _weights(self, loads: tuple[AdapterLoad, ...]) -> tuple[AdapterWeights, ...]:
        # Looked up now: what is dropped from host memory later is kept alive by this step.
        if self.adapters is None:
            raise RuntimeError("a step with adapters, but this engine was started without")
        return tuple(self.adapters.weights(load.version) for load in loads)

    def _start(self, work: Callable[..., T], *arguments: Any) -> "Future[T] | Finished[T]":
        if self._thread is not None:
            return self._thread.submit(work, *arguments)
        return Finished.of(work, *arguments)

    @torch.inference_mode()
    def move(self, moves: tuple[Move, ...]) -> None:
        """At once, in the caller's thread."""
        self._forward.logits(moves, None)

    @torch.inference_mode()
    def _compute_in_thread(self, *step: Any) -> StepResults | None:
        return self._compute(*step)

    def _compute(
        self,
        moves: tuple[Move, ...],
        plans: tuple[LoadPlan, ...],
        weights: tuple[AdapterWeights, ...],
        prepared: PreparedStep | None,
        sampling: SampledDraws | None,
        rows: WantedRows | None,
        missing: dict[int, str],
        before: LaunchedStep | None,
        debugged: DebugStep | None,
    ) -> StepResults | None:
        try:
            if self._drafter is not None and moves:
                self._drafter.move(moves)
            followed = before.results() if before is not None else None
            if followed is not None and prepared is not None:
                prepared.follow(followed.tokens)
            # Computed beside the model. A wait for tokens would keep the device idle.
            early = followed is None or self._masks_first
            masks = self._ask_masks(sampling, followed) if early else None
            if self.adapters is not None:
                missing.update(self._load_adapters(plans, weights, prepared))
            logits = self._forward.logits(moves, prepared, ignore_rows if rows is None else rows.add)
            if rows is not None:
                rows.finish()
            self._write(debugged, logits, followed)
            if not early:
                masks = self._ask_masks(sampling, followed)
            self._replicate(sampling, logits, followed)
        except Exception as error:
            # The others may have computed the step, or wait for rank 0 in one of its collectives.
            if self._followers is not None:
                self._followers.on_step_failed(error)
            raise
        if sampling is None or logits is None:
            return None
        draws, plan, _ = sampling
        programs = self._run_programs(plan, logits, followed, masks)
        drawn = sample(logits, plan, programs, widen=self._widen, kernels=self._kernels)
        results = StepResults(drawn, draws, programs, hidden=self.overlap)
        # Checked only after the whole step is queued: the device idles at most until the next one is queued too.
        if not results.short():
            return results
        drawn = sample(logits, plan, programs, kernels=self._kernels)
        return StepResults(drawn, draws, programs, hidden=self.overlap)

    def _write(self, debugged: DebugStep | None, logits: Tensor | None, followed: StepResults | None) -> None:
        if self.debug is not None and debugged is not None:
            self.debug.write(debugged, logits, None if followed is None else followed.tokens_on_host())

    def _load_adapters(
        self, plans: tuple[LoadPlan, ...], weights: tuple[AdapterWeights, ...], prepared: PreparedStep | None
    ) -> Mapping[int, str]:
        """Returns those of the step that are missing then."""
        if plans:
            self._forward.load_adapters(plans, weights)
        return {} if prepared is None else self._forward.missing_adapters(prepared)

    def _ask_masks(self, sampling: SampledDraws | None, followed: StepResults | None) -> AskedMasks | None:
        """None: no draw is guided."""
        if self.guides is None or sampling is None or (programs := sampling.plan.programs) is None:
            return None
        if sampling.masks is not None:
            return sampling.masks
        before = None if followed is None or not programs.is_guided else followed.tokens_on_host()
        return AskedMasks.of(self.guides.masks, programs, before)

    def _replicated_step(self, sampling: SampledDraws | None) -> ReplicatedStep | None:
        if self.replicated is None:
            return None
        return self.replicated.step(None if sampling is None else sampling.plan.programs)

    def _replicate(self, sampling: SampledDraws | None, logits: Tensor | None, followed: StepResults | None) -> None:
        """The other ranks call processors too, if there are any in this step."""
        if self._followers is None or self.replicated is None or sampling is None or logits is None:
            return
        plan = sampling.plan
        if plan.programs is not None and plan.processed_rows is not None:
            before = None if followed is None else followed.tokens_on_host()
            rows = logits.index_select(0, plan.processed_rows)
            self._followers.send_rows(rows, plan.programs.followed(before))

    def _run_programs(
        self, plan: SamplingPlan, logits: Tensor, followed: StepResults | None, masks: AskedMasks | None
    ) -> ProgramResults:
        """While the device computes the model: programs need the previous step's tokens on the host, the model does
        not."""
        if plan.programs is None:
            return NO_PROGRAMS
        before = None if followed is None else followed.tokens_on_host()
        results = plan.run_programs(logits, before, self.processors, masks)
        return results._replace(edits=to_device(results.edits, self._forward.device))
