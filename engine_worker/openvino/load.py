"""Builds a runner on OpenVINO from a checkpoint, or raises RefusedError with the reason why it cannot."""

import ctypes
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import openvino as ov
import torch

from engine_worker.attention.reference import ReferenceAttention
from engine_worker.formats.rounding import NAMES
from engine_worker.formats.rounding_error import RoundingError
from engine_worker.layers.adapters import Target, find_targets
from engine_worker.layers.shard import UNSHARDED, Place
from engine_worker.lora.device import DeviceAdapters, make_adapters
from engine_worker.lora.library import make_library
from engine_worker.models.config import DecoderConfig, NotNativeError, narrow_windows, widest_window
from engine_worker.models.decoder import CausalLM
from engine_worker.models.registry import model_class
from engine_worker.openvino.cache import CPU, BlockCache, BlockShape
from engine_worker.openvino.compiled import Precision, compile_decoder, has_bfloat16
from engine_worker.openvino.exact import Exact, find_exact
from engine_worker.openvino.forward import OpenVinoForward
from engine_worker.openvino.kinds import NO_KINDS, Kinds, LoadedMatrices, find_kinds
from engine_worker.openvino.remembered import remembered
from engine_worker.openvino.trial import RefusedError, Shape, verify
from engine_worker.openvino.weights import ConstantStore, open_store
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.runner.config import DraftConfig, RunnerConfig, check_output_layers
from engine_worker.runner.extensions import NO_EXTENSIONS, Extensions
from engine_worker.runner.load import share_of_rank
from engine_worker.runner.memory import count_blocks, free_memory, size_pools
from engine_worker.runner.runner import DraftRunner, ModelRunner
from engine_worker.runner.vision import load_images
from engine_worker.runner.weights import Progress, fill_weights, open_weights
from engine_worker.sampling.processors import Warn
from engine_worker.step import Slice
from sluice.checkpoint.folder import Checkpoint
from sluice.host.installation import BUILD_VERSION
from sluice.settings.engine import OPENVINO_BLOCK

VERSION = "2026.4."
"""Prefix of the supported versions: the inputs of the paged attention operation change between versions."""


class TestResults(NamedTuple):
    result: str
    """Of the trial, for the log."""
    exact: Exact


class Tested(NamedTuple):
    """A checkpoint whose options have passed the trial on this machine."""

    checkpoint: Checkpoint
    config: RunnerConfig
    shape: DecoderConfig
    kinds: Kinds
    precision: Precision
    result: str
    """Of the trial, for the log."""
    exact: Exact


class Compiled(NamedTuple):
    tested: Tested
    decoder: ov.CompiledModel
    adapters: DeviceAdapters | None
    weights: str
    """Where the weights are stored, for the log."""

    @property
    def block(self) -> BlockShape:
        return BlockShape.of(self.decoder, self.tested.shape.num_layers)

    def forward(self, cache: BlockCache, threads: int) -> OpenVinoForward:
        _, config, shape, _, precision, _, exact = self.tested
        return OpenVinoForward(
            self.decoder,
            shape,
            cache,
            str(precision),
            threads,
            config.output_layers,
            self.adapters,
            exact=exact.exact,
            separates=precision.separates,
            pass_tokens=exact.pass_tokens,
        )


def load_openvino(
    checkpoint: Checkpoint,
    config: RunnerConfig,
    progress: Progress,
    warn: Warn,
    draft: DraftConfig | None = None,
    extensions: Extensions = NO_EXTENSIONS,
) -> ModelRunner:
    """See `engine_worker.backend.load_runner`. Raises RefusedError before the weights are read."""
    if not ov.__version__.startswith(VERSION):
        raise RefusedError(f"openvino {ov.__version__} is installed, but {VERSION}x is required")
    config = replace(share_of_rank(config, CPU), tokens_per_block=OPENVINO_BLOCK)
    torch.set_num_threads(config.threads)
    folder = extensions.pool_folder
    # In the folder of the pool file: restarts are what both are for.
    memory = None if folder is None else folder.root
    tested = [_tested(checkpoint, config, memory)]
    if draft is not None:
        draft_config = draft.runner_config(config, widest_window(tested[0].shape.windows))
        tested.append(_tested(draft.checkpoint, draft_config, memory))
    images = load_images(checkpoint, config, torch.float32, CPU)
    compiled = [_compile(model, progress, warn) for model in tested]
    _return_freed_memory()
    blocks = [model.block for model in compiled]
    caches, file = _caches(blocks, tested[0].shape, config, checkpoint.max_context_tokens, folder)
    forwards = [model.forward(cache, config.threads) for model, cache in zip(compiled, caches, strict=True)]
    drafter = None
    if draft is not None:
        draft_runner = ModelRunner(forwards[1], extensions=Extensions(guides=extensions.guides))
        drafter = DraftRunner(draft_runner, draft.checkpoint.max_context_tokens)
    adapters = make_library(forwards[0].adapters, config, torch.float32, warn)
    extensions = replace(extensions, adapters=adapters, images=images, pool_file=file)
    runner = ModelRunner(forwards[0], overlap=bool(config.overlap), drafter=drafter, extensions=extensions)
    if compiled[0].adapters is not None:
        runner.choices["lora_pages"] = str(compiled[0].adapters.num_pages)
    if images is not None:
        runner.choices["image_tokens"] = str(images.per_image)
    runner.choices |= {
        "implementation": "sluice",
        "backend": "openvino",
        "backend_reason": tested[0].result,
        "exact": str(tested[0].exact.exact),
        "pass_tokens": str(tested[0].exact.pass_tokens),
        "quantize": NAMES[tested[0].precision.quantize],
        "kv_precision": tested[0].precision.kv,
        "weights": compiled[0].weights,
        "matrices": tested[0].kinds.summary,
    }
    return runner


def _compile(tested: Tested, progress: Progress, warn: Warn) -> Compiled:
    config = tested.config
    with torch.inference_mode():
        decoder, store, targets, exact = _build(tested, progress, warn)
        # What building the graph has freed, among it the model's own weights, must not be in memory beside what the
        # plugin packs now.
        _return_freed_memory()
        _pack(decoder, tested.shape, config.threads)
        store.release()
    if not exact:
        tested = tested._replace(exact=tested.exact._replace(exact=False))
    # Before the KV cache is allocated, which gets a fraction of the memory that remains.
    adapters = make_adapters(targets, config, torch.float32, CPU, UNSHARDED, free_memory(CPU)) if config.lora else None
    return Compiled(tested, decoder, adapters, store.summary)


class Built(NamedTuple):
    decoder: ov.CompiledModel
    store: ConstantStore
    """Has the weights."""
    targets: list[Target]
    """Of adapters."""
    exact: bool
    """Whether what was tested holds: no matrix was of another kind."""


def _build(tested: Tested, progress: Progress, warn: Warn) -> Built:
    checkpoint, config, shape, kinds, precision, *_ = tested
    model = CausalLM(shape, ReferenceAttention(shape.heads), Place(torch.float32, CPU, UNSHARDED))
    targets = find_targets(model.model.layers)
    build = partial(compile_decoder, model, precision, config.threads, lora=config.lora)
    error = RoundingError(precision.quantize)
    if config.weights == "random":
        fill_weights(model, checkpoint, config, progress)
        error.add_all(model.targets())
        error.report(checkpoint.name, warn)
        store = open_store(config.weights_folder)
        return Built(build(store, config.output_layers), store, targets, exact=True)
    with open_weights(model, checkpoint, progress) as weights:
        weights.fill_plain()
        model.freeze()
        matrices = LoadedMatrices(weights, model.targets(), kinds)
        store = open_store(config.weights_folder, weights.mapped)
        decoder = build(store, config.output_layers, matrices=matrices)
        weights.finish()
    error.add_all({name: matrix for name, matrix in model.targets().items() if name not in matrices.stored})
    error.report(checkpoint.name, warn)
    return Built(decoder, store, targets, exact=not matrices.unexpected)


def _shape(checkpoint: Checkpoint, config: RunnerConfig) -> DecoderConfig:
    """Raises RefusedError, and CheckpointError on a broken config.json."""
    try:
        shape = model_class(checkpoint.config).read_config(checkpoint.config)
    except NotNativeError as error:
        raise RefusedError(str(error)) from error
    # A subclass describes a model that `graph` cannot build.
    if type(shape) is not DecoderConfig:
        raise RefusedError("a mixture of experts is not supported")
    limits, context = config.max_attention_window, checkpoint.max_context_tokens
    return replace(shape, windows=narrow_windows(shape.windows, limits, context))


def check_servable(checkpoint: Checkpoint, config: RunnerConfig) -> None:
    """Raises RefusedError on a model or settings that are refused without a trial, and CheckpointError."""
    precision = Precision.of(config)
    _shape(checkpoint, config)
    if precision.dtype == "bfloat16" and not has_bfloat16():
        raise RefusedError("this CPU does not compute bfloat16 in hardware: it would be slower than float32")


def _tested(checkpoint: Checkpoint, config: RunnerConfig, memory: Path | None) -> Tested:
    """Run the trial. `memory`: a folder in which results are remembered. Raises RefusedError."""
    check_servable(checkpoint, config)
    shape, precision = _shape(checkpoint, config), Precision.of(config)
    kinds = NO_KINDS if config.weights == "random" else find_kinds(checkpoint, shape)
    precision = precision._replace(stored=kinds.rounds_activations)
    check_output_layers(config.output_layers, shape.num_layers)
    tested = Shape(shape, kinds)

    def test() -> TestResults:
        with torch.inference_mode():
            result = verify(tested, precision, config.threads, lora=config.lora)
            return TestResults(result, find_exact(tested, precision, config.threads, lora=config.lora))

    versions = BUILD_VERSION, ov.__version__, torch.__version__
    question = *versions, tested, precision, config.threads, config.lora
    try:
        result, exact = remembered(memory, question, TestResults, test)
    except RuntimeError as error:
        # The last line of OpenVINO's errors says what went wrong, the lines before it where.
        raise RefusedError(f"failed in a test: {' '.join(str(error).split())[-300:]}") from error
    return Tested(checkpoint, config, shape, kinds, precision, result, exact)


def _pack(compiled: ov.CompiledModel, shape: DecoderConfig, threads: int) -> None:
    """Run one step, in which the plugin packs quantized weights: that takes seconds, and memory that must be in use
    before the size of the KV cache is computed."""
    cache = BlockCache(BlockShape.of(compiled, shape.num_layers), 1)
    forward = OpenVinoForward(compiled, shape, cache, "float32", threads)
    forward.logits((), forward.prepare(forward.arrays([Slice([0], 0, [0], ())])))


def _return_freed_memory() -> None:
    """Return memory freed while loading to the system: glibc retains about a tenth of the weights' size."""
    if sys.platform == "linux":
        # C libraries other than glibc have no malloc_trim.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _caches(
    blocks: list[BlockShape], shape: DecoderConfig, config: RunnerConfig, context: int, folder: PoolFolder | None
) -> tuple[list[BlockCache], PoolFile | None]:
    """A cache per model, with the same number of blocks in each, and the file with the blocks of the first."""
    nbytes = sum(block.nbytes for block in blocks)
    size = size_pools(
        config,
        nbytes,
        lambda: count_blocks(config, nbytes, shape.heads.num_kv_heads, context, CPU),
        CPU,
        None if folder is None else partial(folder.open, blocks[0].layout),
    )
    files = [size.file, *[None for _ in blocks[1:]]]
    caches = [
        BlockCache(block, size.num_blocks, size.num_host_blocks, file)
        for block, file in zip(blocks, files, strict=True)
    ]
    return caches, size.file
