"""Reads the matrices of a quantized checkpoint for the layers of a model: as stored where there are kernels for them,
decoded where not."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from engine_worker.attention.backend import check_device, first_line
from engine_worker.formats.rounding import rounding_of
from engine_worker.formats.rounding_error import RoundingError
from engine_worker.formats.source import find_weights
from engine_worker.formats.stored import Stored, stack
from engine_worker.layers.coded import (
    Buffer,
    Coded,
    CodedExperts,
    CodedGroup,
    CodedKernels,
    CodedProduct,
    CodedTable,
    DenseProduct,
    JoinedProduct,
    encode,
    encode_experts,
    refused,
)  # fmt: skip
from engine_worker.layers.layer import GroupedProduct, Table
from engine_worker.layers.packing import Product
from engine_worker.layers.shard import Cut, Place
from engine_worker.models.decoder import CausalLM
from engine_worker.runner.coded_trial import TRIAL_OUTPUTS, some_experts, verify, verify_experts
from engine_worker.runner.config import RunnerConfig
from engine_worker.runner.random_codes import FORMATS as RANDOM_FORMATS
from engine_worker.runner.random_codes import RandomCodes
from engine_worker.runner.weights import CheckpointWeights, Progress, open_weights
from engine_worker.sampling.processors import Warn, ignore_warning
from sluice.checkpoint.folder import Checkpoint

PAIR = 2


class Found(NamedTuple):
    """Kernels for the quantized matrices of a checkpoint."""

    kernels: CodedKernels | None
    reason: str = ""
    """Why they are decoded, for the log; empty if there are none, or on a CPU."""


def find_kernels(checkpoint: Checkpoint, config: RunnerConfig, device: torch.device) -> Found:
    """Raises CheckpointError, and ValueError if the setting `quantize` needs kernels that are missing."""
    if device.type != "cuda" or not (config.quantize != "none" or _is_quantized(checkpoint, config)):
        return Found(None)
    reason = "fused_kernels = false"
    if config.fused_kernels:
        try:
            from engine_worker.layers.coded_kernels import KERNELS
        except Exception as error:  # noqa: BLE001 - Triton may raise anything when it is imported
            reason = first_line(error)
        else:
            return Found(KERNELS)
    if config.quantize != "none":
        raise ValueError(f"quantize = {config.quantize} needs Triton's kernels on a GPU: {reason}")
    return Found(None, f"decoded: {reason}")


def _is_quantized(checkpoint: Checkpoint, config: RunnerConfig) -> bool:
    """Whether any matrix is."""
    if config.weights == "random":
        return checkpoint.quantization is not None and checkpoint.quantization.method in RANDOM_FORMATS
    return any(weight.whole is None for weight in find_weights(checkpoint.path).values())


class CodedWeights:
    """`Matrices` of a checkpoint, for a rank. Before a kernel is used for a kind of matrices, it is tested with the
    first of that kind, on the device; if it fails, these are decoded."""

    def __init__(
        self,
        weights: CheckpointWeights | RandomCodes,
        cuts: Mapping[str, Cut],
        place: Place,
        kernels: CodedKernels,
        quantize: str = "none",
    ) -> None:
        """`quantize`: the setting."""
        self._weights = weights
        self._quantize = quantize
        self._cuts = cuts
        self._place = place
        self._kernels = kernels
        self._buffer = Buffer(place.dtype, place.device)
        self._tested: dict[object, str | None] = {}
        """Why the kernels cannot be used, or None, by what they were compiled for."""
        self._counts: Counter[str] = Counter()
        self.read: set[str] = set()
        """Names of the matrices that were read."""
        self.error = RoundingError(quantize)

    @property
    def summary(self) -> str:
        """How quantized matrices are held, for the log."""
        return ", ".join(f"{count} {how}" for how, count in self._counts.most_common())

    def linear(self, names: Sequence[str], outputs: int, *, biased: bool) -> Tensor | Product:
        """See `Matrices.linear`."""
        return self._linear([self._part(name) for name in names], outputs, biased=biased)

    def table(self, name: str, rows: int) -> Tensor | Table:
        part = self._part(name)
        if isinstance(part, Stored) and part.order is not None:
            self._counts["decoded (a table whose inputs have an order)"] += 1
            part = self._dense(part)
        form = self._linear([part], rows, biased=False)
        if isinstance(form, Tensor):
            return form
        if isinstance(form, JoinedProduct):
            raise TypeError("a single matrix is in one piece")
        return CodedTable(form, self._kernels, self._place.dtype)

    def experts(self, names: Sequence[Sequence[str]]) -> Tensor | GroupedProduct:
        """See `Matrices.experts`."""
        each = [[self._part(name) for name in expert] for expert in names]
        stored = [[part for part in parts if isinstance(part, Stored)] for parts in each]
        count = sum(map(len, stored))
        problem: str | None = "experts of different kinds"
        if count == sum(map(len, each)) and (coded := encode_experts(stored, self._place.device)) is not None:
            problem = self._problem(("experts", coded.variant), lambda: self._verify_experts(stored, coded))
            if problem is None:
                self._counts[f"as stored in {coded.matrix.type}"] += count
                return CodedGroup(coded, self._kernels)
        if count:
            self._counts[f"decoded ({problem})"] += count
        return torch.stack([torch.cat([self._plain(part) for part in parts]) for parts in each])

    def _linear(
        self, each: Sequence[Stored | Tensor], outputs: int, *, biased: bool
    ) -> Tensor | CodedProduct | JoinedProduct:
        parts = _joined(each)
        missing = outputs - sum(len(part.codes if isinstance(part, Stored) else part) for part, _ in parts)
        if missing:
            # Only vocabularies have rows of zeros, after their only part.
            [(part, count)] = parts
            parts = [(part.with_rows(outputs) if isinstance(part, Stored) else F.pad(part, (0, 0, 0, missing)), count)]
        forms = _dense_joined([self._form(part, count, biased=biased) for part, count in parts])
        if len(forms) == 1:
            return forms[0]
        sizes = [len(form) if isinstance(form, Tensor) else form.matrix.outputs for form in forms]
        return JoinedProduct([DenseProduct(form) if isinstance(form, Tensor) else form for form in forms], sizes)

    def _part(self, name: str) -> Stored | Tensor:
        """This rank's share."""
        self.read.add(name)
        if name not in self._weights.quantized:
            plain = self._weights.plain(name).to(self._place.device)
            self.error.add(name, plain)
            rounding = rounding_of(self._quantize, name)
            return plain.to(self._place.dtype) if rounding is None else rounding(plain)
        stored, cut = self._weights.read(name), self._cuts.get(name)
        part, reason = _share(stored, cut)
        reason = reason or refused(part)
        if reason is None:
            return part
        self._counts[f"decoded ({reason})"] += 1
        return self._dense(stored)[() if cut is None else cut.slices].contiguous()

    def _form(self, part: Stored | Tensor, count: int, *, biased: bool) -> Tensor | CodedProduct:
        """`count`: matrices of the checkpoint in this one."""
        if isinstance(part, Tensor):
            return part
        matrix = encode(part, self._place.device)
        problem = self._problem((matrix.variant, biased), lambda: self._verify(part, matrix, biased=biased))
        if problem is not None:
            self._counts[f"decoded ({problem})"] += count
            return self._dense(part)
        self._counts[f"as stored in {part.type}"] += count
        return CodedProduct(matrix, self._kernels, self._buffer)

    def _dense(self, stored: Stored) -> Tensor:
        return stored.decode().to(self._place.device, self._place.dtype)

    def _plain(self, part: Stored | Tensor) -> Tensor:
        return self._dense(part) if isinstance(part, Stored) else part

    def _problem(self, kind: object, test: Callable[[], None]) -> str | None:
        """Why the kernels cannot be used for this kind of matrices, the first of which is tested."""
        if kind not in self._tested:
            try:
                test()
                self._tested[kind] = None
            except Exception as error:  # noqa: BLE001 - a compiler may raise anything
                subject = "a Triton kernel for quantized matrices"
                check_device(self._place.device, subject, "fused_kernels = false", error)
                self._tested[kind] = first_line(error)
        return self._tested[kind]

    def _verify(self, stored: Stored, matrix: Coded, *, biased: bool) -> None:
        rows = min(TRIAL_OUTPUTS, matrix.outputs)
        dense = self._dense(replace(stored.rows(slice(0, rows)), order=None))
        verify(self._kernels, matrix.rows(0, rows), dense, biased=biased)

    def _verify_experts(self, experts: Sequence[Sequence[Stored]], coded: CodedExperts) -> None:
        chosen = some_experts(coded.count)
        dense = {expert: torch.cat([self._dense(part) for part in experts[expert]]) for expert in chosen}
        verify_experts(self._kernels, coded, dense)


def hold_weights(
    model: CausalLM,
    checkpoint: Checkpoint,
    config: RunnerConfig,
    place: Place,
    kernels: CodedKernels,
    progress: Progress,
    warn: Warn = ignore_warning,
) -> str:
    """Fill the weights of a model that was made in a DeferredPlace, after which it can be called. Returns how its
    quantized matrices are held, for the log. Raises CheckpointError. `warn`: reports a large error of rounding."""
    with _open(model, checkpoint, config, place, progress) as weights:
        matrices = CodedWeights(weights, model.cuts(), place, kernels, config.quantize)
        model.hold(matrices)
        weights.fill(but=matrices.read)
    model.freeze()
    matrices.error.report(checkpoint.name, warn)
    return matrices.summary


def _open(
    model: CausalLM, checkpoint: Checkpoint, config: RunnerConfig, place: Place, progress: Progress
) -> CheckpointWeights | RandomCodes:
    if config.weights == "checkpoint":
        return open_weights(model, checkpoint, progress)
    return RandomCodes(model, checkpoint, config.weights_seed, place.device, progress)


def _share(stored: Stored, cut: Cut | None) -> tuple[Stored, str | None]:
    """A rank's share, or the whole and why it cannot be cut."""
    if cut is None or cut.span.filled == cut.span.total:
        return stored, None
    columns = cut.slices[-1]
    if cut.dim == 0:
        return stored.rows(columns), None
    if stored.order is not None:
        return stored, "its groups are of inputs of several ranks"
    if columns.start % PAIR or columns.stop % PAIR:
        return stored, "a share of an odd number of inputs"
    return stored.columns(columns.start, columns.stop), None


def _joined(parts: Sequence[Stored | Tensor]) -> list[tuple[Stored | Tensor, int]]:
    """Neighbours in one matrix, where that is possible, and of how many each consists."""
    joined: list[tuple[Stored | Tensor, int]] = []
    for part in parts:
        before, count = joined[-1] if joined else (None, 0)
        both = stack([before, part]) if isinstance(before, Stored) and isinstance(part, Stored) else None
        if both is None:
            joined.append((part, 1))
        else:
            joined[-1] = both, count + 1
    return joined


def _dense_joined(forms: Sequence[Tensor | CodedProduct]) -> list[Tensor | CodedProduct]:
    joined: list[Tensor | CodedProduct] = []
    for form in forms:
        if joined and isinstance(form, Tensor) and isinstance(joined[-1], Tensor):
            joined[-1] = torch.cat((joined[-1], form))
        else:
            joined.append(form)
    return joined
