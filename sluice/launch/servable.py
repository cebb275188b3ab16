"""Whether a checkpoint can be served, as far as can be said without torch and before anything is started."""

import ast
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sluice.ring.checkpoint import Checkpoint, CheckpointError
from sluice.ring.weight_files import check_weight_files

LIBRARY = "transformers"
TABLE_FILE, TABLE = "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_servable(checkpoint: Checkpoint, *, weights: bool) -> None:
    """Raises CheckpointError. The engine, which knows more, may still refuse it.

    weights: whether the engine is going to read them.
    """
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
            f"{file}: the architecture {', '.join(map(str, names))} is not supported: it is no decoder-only language "
            f"model that {LIBRARY} {version(LIBRARY)} knows; docs/models.md lists what is served"
        )
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method", "") if isinstance(quantization, Mapping) else ""
        raise CheckpointError(
            f"{file}: quantized weights ({method or 'quantization_config'}) are not supported: "
            "give the model that these were made of"
        )


def causal_language_models() -> frozenset[str]:
    """Architectures that the installed transformers has. Empty where its table is not found: then the engine decides.

    Its source is read, for importing it takes seconds and torch.
    """
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
    """Of the table, an OrderedDict of a list of (model type, one architecture or a tuple of several)."""
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(args=[ast.List(entries)])) if name == TABLE:
                values = (entry.elts[1] for entry in entries if isinstance(entry, ast.Tuple))
                constants = (node for value in values for node in ast.walk(value) if isinstance(node, ast.Constant))
                yield from (str(each.value) for each in constants)
