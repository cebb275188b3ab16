"""Checkpoints written by compressed-tensors, with the qparams that its observers would find."""

import shutil
from pathlib import Path

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
from compressed_tensors.quantization.quant_args import QuantizationArgs
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.engine_worker.formats.checkpoints import FILE, MODELS
from tests.engine_worker.models.checkpoints import write_checkpoint


def compress(model: nn.Module, folder: Path, config: QuantizationConfig) -> ModelCompressor:
    """Quantize the model, and write its entry of config.json. The model then has the tensors of the format."""
    apply_quantization_config(model, config)
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            _calibrate(module, scheme)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    compressor.update_config(str(folder))
    return compressor


def write_pair(folder: Path, model: str, config: QuantizationConfig) -> tuple[Path, Path, nn.Module]:
    """The checkpoint of one of MODELS, and the dense one of the values that the library reads in it; and the model."""
    quantized, dense = folder / "quantized", folder / "dense"
    written = write_checkpoint(quantized, MODELS[model])
    shutil.copytree(quantized, dense)
    compressor = compress(written, quantized, config)
    tied = ["lm_head.weight"] if written.config.tie_word_embeddings else []
    save_file({name: each for name, each in written.state_dict().items() if name not in tied}, quantized / FILE)
    compressor.decompress_model(written)
    save_file({name: written.state_dict()[name] for name in load_file(dense / FILE)}, dense / FILE)
    return quantized, dense, written


def _calibrate(module: nn.Module, scheme: QuantizationScheme) -> None:
    for name, parameter in module.named_parameters(recurse=False):
        if name.endswith("_scale"):
            parameter.data.fill_(0.5)
    if (args := scheme.weights) is None:
        return
    low, high = _ranges(module.weight.detach(), args)
    overall = None
    if hasattr(module, "weight_global_scale"):
        overall = generate_gparam(low.min(), high.max())
        module.weight_global_scale.data.copy_(overall)
    scales, zeros = calculate_qparams(low, high, args, global_scale=overall)
    module.weight_scale.data.copy_(scales)
    module.weight_zero_point.data.copy_(zeros)


def _ranges(weight: Tensor, args: QuantizationArgs) -> tuple[Tensor, Tensor]:
    """The smallest and largest values that share a scale."""
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns),
        "channel": (1, columns),
        "group": (1, args.group_size),
        "tensor_group": (1, args.group_size),
        "block": args.block_structure,
    }[args.strategy]
    padded = nn.functional.pad(weight, (0, -columns % width, 0, -rows % height))
    blocks = padded.view(padded.shape[0] // height, height, padded.shape[1] // width, width)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    return (low.view(1), high.view(1)) if args.strategy == "tensor" else (low, high)
