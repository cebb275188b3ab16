"""The optional parts of a runner."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from engine_worker.guided.guides import Guides
from engine_worker.lora.library import AdapterLibrary
from engine_worker.pool_files.folder import PoolFolder
from engine_worker.pool_files.pool_file import PoolFile
from engine_worker.runner.debug_tensors import DebugTensors
from engine_worker.sampling.processors import NO_PROCESSORS, Processors
from engine_worker.sampling.replicas import ReplicatedSequences
from engine_worker.vision.rows import ImageRows


@dataclass(frozen=True, slots=True)
class Extensions:
    """Optional parts of a runner, complete before it is built. A part that is None is off."""

    processors: Processors = NO_PROCESSORS
    """Logits processors that requests can name."""
    replicated: ReplicatedSequences | None = None
    """Sends the calls of logits processors to the other ranks; None: only rank 0 calls processors."""
    output_tensors: Mapping[str, str] = field(default_factory=dict)
    """Functions of the operator as module:function, by the name of the tensor that they compute."""
    debug: DebugTensors | None = None
    """Writes the arrays of each step to files."""
    guides: Guides | None = None
    """None: guided requests are rejected."""
    adapters: AdapterLibrary | None = None
    """None: requests with a LoRA adapter are rejected."""
    images: ImageRows | None = None
    """None: the model accepts no images."""
    pool_folder: PoolFolder | None = None
    """For the file of the KV cache; None: its memory is private."""
    pool_file: PoolFile | None = None
    """Opened when the KV cache was allocated."""


NO_EXTENSIONS = Extensions()
