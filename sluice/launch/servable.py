"""Whether a checkpoint can be served: checks that need neither torch nor a running service."""

import ast
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sluice.ring.checkpoint import Checkpoint, CheckpointError, check_weight_files

LIBRARY = "transformers"
TABLE_FILE, TABLE = "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_servable(checkpoint: Checkpoint, *, weights: bool) -> None:
    """Raises CheckpointError. `weights`: the engine will read the weight files."""
    _check_architecture(checkpoint.path / "config.json", checkpoint.config)
    try:
        json.loads(checkpoint.tokenizer_file.read_bytes())
    except ValueError as error:
        raise CheckpointError(f"{checkpoint.tokenizer_file} is not valid JSON: {error}") from error
    if weights:
        check_weight_files(checkpoint.path)


def _check_architecture(file: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{file} has no architectures: it does not say which model this is")
    known = causal_language_models()
    if known and not known & {str(name) for name in names}:
        raise CheckpointError(
            f"{file}: the architecture {', '.join(map(str, names))} is not supported: it is not a decoder-only "
            f"language model that {LIBRARY} {version(LIBRARY)} knows; docs/models.md lists what is served"
        )
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "") if isinstance(quantization, Mapping) else ""
        raise CheckpointError(
            f"{file}: quantized weights ({method or 'quantization_config'}) are not supported: give the original model"
        )


def causal_language_models() -> frozenset[str]:
    """Architectures of the installed transformers. Empty if its table is not found: then the engine decides."""
    # Parsed from its source, because importing it takes seconds and needs torch.
    found = find_spec(LIBRARY)
    folders = [] if found is None else found.submodule_search_locations or []
    for folder in folders:
        try:
            tree = ast.parse((Path(folder) / TABLE_FILE).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            continue
        return frozenset(_architectures(tree))
    return frozenset()


def _architectures(tree: ast.Module) -> Iterator[str]:
    """The table is an OrderedDict of (model type, one architecture or a tuple of them)."""
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(args=[ast.List(entries)])) if name == TABLE:
                values = (entry.elts[1] for entry in entries if isinstance(entry, ast.Tuple))
                constants = (node for value in values for node in ast.walk(value) if isinstance(node, ast.Constant))
                yield from (str(each.value) for each in constants)
