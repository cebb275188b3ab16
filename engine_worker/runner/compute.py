"""Computes one launched step: block moves, adapter loads, the model, guides' masks, logits processors, sampling."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine_worker.attention.saver import Saved
from engine_worker.lora.checkpoint import AdapterWeights
from engine_worker.lora.device import LoadPlan
from engine_worker.runner.batch import to_device
from engine_worker.runner.debug_tensors import DebugStep
from engine_worker.runner.extensions import Extensions
from engine_worker.runner.followers import Followers
from engine_worker.runner.forward import Forward, PreparedStep, ignore_rows
from engine_worker.runner.launched import LaunchedStep, SampledResults
from engine_worker.runner.rows import RequestedRows
from engine_worker.sampling.choose import SamplingKernels
from engine_worker.sampling.guided_draws import RequestedMasks
from engine_worker.sampling.sampler import NO_RULES, RuleResults, SamplingPlan, sample
from engine_worker.step import Draw, Move, Slice


class SampledDraws(NamedTuple):
    """The draws of a step and how they are sampled."""

    draws: list[Draw]
    plan: SamplingPlan
    masks: RequestedMasks | None = None
    """Masks that were requested when the step was launched; None: they are requested when it is computed."""


class StepDraws(NamedTuple):
    """D draws from R rows of logits: one row per slice that draws, and one more for each of its drafts."""

    draws: list[Draw]
    rows: list[int]
    """[D]: each draw's row."""
    num_rows: int
    """R."""
    follows: dict[int, int]
    """For draws whose last output token is still being sampled: the draw of the previous step that samples it."""

    @classmethod
    def of(cls, slices: Sequence[Slice]) -> "StepDraws":
        draws: list[Draw] = []
        rows: list[int] = []
        follows: dict[int, int] = {}
        num_rows = 0
        for part in slices:
            if not part.draws:
                continue
            for draw in part.draws:
                if part.follows is not None:
                    follows[len(draws)] = part.follows
                draws.append(draw)
                # In steps of the draft model `drafts` is 0: its cache has all draft tokens before a draw but the last.
                rows.append(num_rows + (len(draw.drafted) if part.drafts else 0))
            num_rows += 1 + part.drafts
        return cls(draws, rows, num_rows, follows)

    def plan(self, vocab_size: int) -> SamplingPlan:
        """Copies what it needs of the draws, which the engine may change afterwards."""
        return SamplingPlan.of(self.draws, self.rows, self.num_rows, vocab_size, self.follows)


class StepWork(NamedTuple):
    """A launched step. Nothing in it refers to lists that the engine may change before the step is computed."""

    moves: tuple[Move, ...]
    loads: tuple[LoadPlan, ...]
    """LoRA adapters to copy to the device before the step."""
    weights: tuple[AdapterWeights, ...]
    """Weights of each of `loads`. Kept alive by the step even if they are dropped from host memory meanwhile."""
    prepared: PreparedStep | None
    """None: there are only moves and loads."""
    sampling: SampledDraws | None
    """None: the step samples nothing."""
    rows: RequestedRows | None
    missing: dict[int, str]
    """Output: see `Launched.missing_adapters`."""
    saved: list[Saved]
    """Output: the copies that the step has begun, at most one."""
    previous: LaunchedStep | None
    """The step before, if this one depends on its results."""
    debug: DebugStep | None


class StepComputer:
    """Called by one thread: the runner's own if steps overlap with planning, else the engine's."""

    def __init__(
        self,
        forward: Forward[Any, Any],
        extensions: Extensions,
        kernels: SamplingKernels,
        followers: Followers | None,
        move_draft_blocks: Callable[[tuple[Move, ...]], None] | None,
        *,
        overlap: bool,
    ) -> None:
        """`move_draft_blocks`: moves the draft model's blocks along; None: there is no draft model."""
        self._forward = forward
        self._extensions = extensions
        self._kernels = kernels
        self._followers = followers
        self._move_draft_blocks = move_draft_blocks
        self._overlap = overlap
        on_cpu = forward.device.type == "cpu"
        # On a CPU results are available immediately, so sampling can look at them and widen its candidates by itself.
        self._widen = on_cpu
        self._masks_first = on_cpu
        """Whether the previous step's tokens are known before the model is queued."""

    @torch.inference_mode()
    def compute_in_thread(self, work: StepWork) -> SampledResults | None:
        """Like `compute`, for a thread that is not in inference mode."""
        return self.compute(work)

    def compute(self, work: StepWork) -> SampledResults | None:
        """Queue the step on the device; None if it samples nothing."""
        try:
            if self._move_draft_blocks is not None and work.moves:
                self._move_draft_blocks(work.moves)
            previous = work.previous.results() if work.previous is not None else None
            logits, masks = self._run_model(work, previous)
            self._send_rows(work.sampling, logits, previous)
        except Exception as error:
            # The other ranks may have computed the step, or wait for rank 0 in one of its collectives.
            if self._followers is not None:
                self._followers.on_step_failed(error)
            raise
        if work.sampling is None or logits is None:
            return None
        draws, plan, _ = work.sampling
        rule_results = self._run_rules(plan, logits, previous, masks)
        sampled = sample(logits, plan, rule_results, widen=self._widen, kernels=self._kernels)
        results = SampledResults(sampled, draws, rule_results, overlapped=self._overlap)
        # Checked only after the whole step is queued: the device idles at most until the next one is queued too.
        if not results.short():
            return results
        sampled = sample(logits, plan, rule_results, kernels=self._kernels)
        return SampledResults(sampled, draws, rule_results, overlapped=self._overlap)

    def request_masks(self, sampling: SampledDraws | None, previous: SampledResults | None) -> RequestedMasks | None:
        """Request the masks of guided draws, unless the launch has done so; None if no draw is guided.

        `previous`: results of the step that samples the last output tokens of some draws.
        """
        guides = self._extensions.guides
        if guides is None or sampling is None or (rules := sampling.plan.rules) is None:
            return None
        if sampling.masks is not None:
            return sampling.masks
        tokens = None if previous is None or not rules.is_guided else previous.tokens_on_host()
        return RequestedMasks.of(guides.masks, rules, tokens)

    def _run_model(
        self, work: StepWork, previous: SampledResults | None
    ) -> tuple[Tensor | None, RequestedMasks | None]:
        prepared, rows = work.prepared, work.rows
        if previous is not None and prepared is not None:
            prepared.follow(previous.tokens)
        # Masks are computed while the model runs. If tokens are still being sampled on a GPU, queue the model first:
        # waiting for the tokens would leave the device idle.
        early = previous is None or self._masks_first
        masks = self.request_masks(work.sampling, previous) if early else None
        if self._extensions.adapters is not None:
            if work.loads:
                self._forward.load_adapters(work.loads, work.weights)
            if prepared is not None:
                work.missing.update(self._forward.missing_adapters(prepared))
        logits = self._forward.logits(work.moves, prepared, ignore_rows if rows is None else rows.add)
        if (saved := self._forward.take_saved()) is not None:
            work.saved.append(saved)
        if rows is not None:
            rows.finish()
        if self._extensions.debug is not None and work.debug is not None:
            tokens = None if previous is None else previous.tokens_on_host()
            self._extensions.debug.write(work.debug, logits, tokens)
        if not early:
            masks = self.request_masks(work.sampling, previous)
        return logits, masks

    def _send_rows(self, sampling: SampledDraws | None, logits: Tensor | None, previous: SampledResults | None) -> None:
        """If the step calls logits processors on every rank, send the other ranks the arguments."""
        if self._followers is None or self._extensions.replicated is None or sampling is None or logits is None:
            return
        plan = sampling.plan
        if plan.rules is not None and plan.processed_rows is not None:
            tokens = None if previous is None else previous.tokens_on_host()
            rows = logits.index_select(0, plan.processed_rows)
            self._followers.send_rows(rows, plan.rules.followed(tokens))

    def _run_rules(
        self, plan: SamplingPlan, logits: Tensor, previous: SampledResults | None, masks: RequestedMasks | None
    ) -> RuleResults:
        """Runs while the device computes the model: rules need the previous step's tokens on the host, the model
        does not."""
        if plan.rules is None:
            return NO_RULES
        tokens = None if previous is None else previous.tokens_on_host()
        results = plan.run_rules(logits, tokens, self._extensions.processors, masks)
        return results._replace(edits=to_device(results.edits, self._forward.device))
