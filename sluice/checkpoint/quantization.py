"""How a checkpoint is quantized, as far as its tensors leave it open, and which kinds are refused. Without torch."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KEYS = ("quantization_config", "compression_config")
"""Entries of config.json; compressed-tensors used the second one at first."""
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of ModelOpt, AutoGPTQ and AutoAWQ, which older versions wrote instead of an entry in config.json."""
GPTQ_BITS = (2, 3, 4, 8)
PACKED_FORMATS = (
    "dense", "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp6-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
"""Formats of compressed-tensors; in "mixed-precision" groups of matrices have their own."""
PACKED_BITS_MAX = 8
MODELOPT_ALGORITHMS = ("FP8", "FP8_PB_WO", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MIXED_PRECISION")


class QuantizationError(ValueError):
    """A kind of quantization that is not supported. The message names the option."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the tensors of a quantized matrix do not say. Which matrices are quantized is decided by their tensors:
    the lists of excluded modules have a different grammar in each tool."""

    method: str
    zero_offset: int = 0
    """To be added to the stored zero points: 1 in the first version of GPTQ's format."""
    block: tuple[int, int] = (128, 128)
    """Rows and columns that share a scale, where a matrix has scales for blocks."""
    bits: tuple[int, ...] = ()
    """Of compressed-tensors' integers, in all groups of matrices. Which of these a matrix has follows from its size.
    (): not known."""
    groups: tuple[int, ...] = ()
    """Inputs that share a scale in compressed-tensors' matrices that have groups. (): not known."""


def read_quantization(folder: Path, config: Mapping[str, Any]) -> Quantization | None:
    """config: config.json. None: the checkpoint does not claim to be quantized. Raises QuantizationError."""
    for key in KEYS:
        if (entry := config.get(key)) is not None:
            if not isinstance(entry, Mapping):
                raise QuantizationError(f"config.json: {key} must be an object (got {type(entry).__name__})")
            return _read(entry, f"config.json: {key}.")
    for name, method in FILES.items():
        if (folder / name).is_file():
            return _read({"quant_method": method} | _content(folder / name), f"{name}: ")
    return None


def _content(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise QuantizationError(f"{file.name} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise QuantizationError(f"{file.name} is not a JSON object")
    # ModelOpt's file has the options in an object of their own.
    options = content.get("quantization", content)
    return options if isinstance(options, dict) else content


def _read(options: Mapping[str, Any], where: str) -> Quantization:
    method = str(options.get("quant_method", "")).lower().removesuffix("_fp4")
    reader = READERS.get(method)
    if reader is None:
        raise QuantizationError(
            f"{where}quant_method = {options.get('quant_method')!r} is not supported; {', '.join(READERS)} are"
        )
    return reader(options, where)


def _refuse(where: str, name: str, value: Any, supported: str) -> None:
    raise QuantizationError(f"{where}{name} = {value!r} is not supported; {supported}")


def _awq(options: Mapping[str, Any], where: str) -> Quantization:
    if (version := str(options.get("version", "gemm")).lower()) != "gemm":
        _refuse(where, "version", version, "AWQ of version gemm is")
    if (backend := options.get("backend", "autoawq")) != "autoawq":
        _refuse(where, "backend", backend, "autoawq is")
    if (bits := options.get("bits", options.get("w_bit", 4))) != 4:
        _refuse(where, "bits", bits, "AWQ with 4 bits is")
    return Quantization("awq")


def _gptq(options: Mapping[str, Any], where: str) -> Quantization:
    layout = options.get("checkpoint_format", "gptq")
    if layout not in ("gptq", "gptq_v2"):
        _refuse(where, "checkpoint_format", layout, "gptq and gptq_v2 are")
    if options.get("is_marlin_format"):
        _refuse(where, "is_marlin_format", True, "false is")
    if (bits := options.get("bits", 4)) not in GPTQ_BITS:
        _refuse(where, "bits", bits, f"GPTQ with {', '.join(map(str, GPTQ_BITS))} bits is")
    return Quantization("gptq", zero_offset=0 if layout == "gptq_v2" else 1)


def _compressed_tensors(options: Mapping[str, Any], where: str) -> Quantization:
    groups = _objects(options.get("config_groups"))
    formats = [options.get("format", "dense"), *(group["format"] for group in groups if group.get("format"))]
    for each in formats:
        if each not in PACKED_FORMATS:
            _refuse(where, "format", each, f"{', '.join(PACKED_FORMATS)} are")
    sparsity = options.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        _refuse(where, "sparsity_config.format", sparsity["format"], "dense is")
    # Rotations of the activations at run time, without which the weights mean something else.
    transforms = options.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        _refuse(where, "transform_config", "…", "checkpoints without transforms are")
    weights = [group["weights"] for group in groups if isinstance(group.get("weights"), Mapping)]
    blocks = [tuple(each["block_structure"]) for each in weights if isinstance(each.get("block_structure"), list)]
    found = _with_block("compressed-tensors", blocks, f"{where}block_structure")
    bits = {each["num_bits"] for each in weights if _is_packed(each)}
    sizes = {size for each in weights if isinstance(size := each.get("group_size"), int) and size > 0}
    return replace(found, bits=tuple(sorted(bits)), groups=tuple(sorted(sizes)))


def _is_packed(weights: Mapping[str, Any]) -> bool:
    bits = weights.get("num_bits")
    return weights.get("type", "int") == "int" and isinstance(bits, int) and 1 <= bits <= PACKED_BITS_MAX


def _fp8(options: Mapping[str, Any], where: str) -> Quantization:
    size = options.get("weight_block_size")
    return _with_block("fp8", [tuple(size)] if isinstance(size, list) else [], f"{where}weight_block_size")


def _with_block(method: str, blocks: list[tuple[Any, ...]], name: str) -> Quantization:
    if not blocks:
        return Quantization(method)
    first, *others = blocks
    sides = [side for side in first if isinstance(side, int) and side > 0]
    if len(first) != 2 or len(sides) != 2 or any(other != first for other in others):
        raise QuantizationError(f"{name} must be two positive integers, the same in all groups (got {blocks})")
    return Quantization(method, block=(sides[0], sides[1]))


def _modelopt(options: Mapping[str, Any], where: str) -> Quantization:
    algorithm = str(options.get("quant_algo", "FP8")).upper()
    if algorithm not in MODELOPT_ALGORITHMS:
        _refuse(where, "quant_algo", algorithm, f"{', '.join(MODELOPT_ALGORITHMS)} are")
    return Quantization("modelopt")


def _bitsandbytes(options: Mapping[str, Any], where: str) -> Quantization:
    kind = options.get("bnb_4bit_quant_type", "fp4")
    if (options.get("load_in_4bit") or options.get("_load_in_4bit")) and kind != "nf4":
        _refuse(where, "bnb_4bit_quant_type", kind, "nf4 is")
    return Quantization("bitsandbytes")


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value.values() if isinstance(each, Mapping)] if isinstance(value, Mapping) else []


READERS: Mapping[str, Callable[[Mapping[str, Any], str], Quantization]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
}
