"""Parts of a loaded model, for tests of what fills its weights."""

import torch
from safetensors.torch import load_file, save_file

from engine_worker.attention.reference import ReferenceAttention
from engine_worker.layers.shard import Place, Shard
from engine_worker.models.registry import model_class


class Rank(Shard):
    """One of two ranks; without the other its results are meaningless."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.size = 2


def change(folder, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def empty_model(checkpoint, shard: Shard):
    architecture = model_class(checkpoint.config)
    shape = architecture.read_config(checkpoint.config)
    backend = ReferenceAttention(shard.heads(shape.heads))
    return architecture(shape, backend, Place(torch.float32, torch.device("cpu"), shard))
