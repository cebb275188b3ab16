"""Draft models of different quality: copies of a checkpoint with noise or fewer layers."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def draft_model(source: Path, folder: Path, *, noise: float = 0.0, num_layers: int | None = None) -> Path:
    """`noise`: standard deviation of the noise added to each matrix, relative to the matrix's own. `num_layers`: how
    many of the first layers are copied; None: all."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    if num_layers is not None:
        config |= {"num_hidden_layers": num_layers, "layer_types": config["layer_types"][:num_layers]}
        dropped = {f"model.layers.{i}." for i in range(num_layers, 100)}
        tensors = {name: tensor for name, tensor in tensors.items() if not any(map(name.startswith, dropped))}
    generator = torch.Generator().manual_seed(1)
    for name, tensor in tensors.items():
        if noise and tensor.dim() == 2:
            random = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            tensors[name] = tensor + noise * tensor.float().std().to(tensor.dtype) * random
    (folder / "config.json").write_text(json.dumps(config))
    for name in COPIED_FILES:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())
    save_file(tensors, folder / "model.safetensors")
    return folder
