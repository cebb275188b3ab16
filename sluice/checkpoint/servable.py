"""Checks, without torch and without a running service, whether a checkpoint can be served, alone or with a draft."""

import ast
import json
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sluice.checkpoint.errors import CheckpointError
from sluice.checkpoint.folder import Checkpoint

LIBRARY = "transformers"
TABLE_FILE, TABLE = "models/auto/modeling_auto.py", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"


def check_servable(checkpoint: Checkpoint) -> None:
    """Raises CheckpointError if the files other than the weights show that the checkpoint cannot be served."""
    _check_architecture(checkpoint.path / "config.json", checkpoint.config)
    _ = checkpoint.quantization
    try:
        json.loads(checkpoint.tokenizer_file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{checkpoint.tokenizer_file} is not valid JSON: {error}") from error


def _check_architecture(file: Path, config: Mapping[str, Any]) -> None:
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise CheckpointError(f"{file}: `architectures` is missing, so the kind of model is unknown")
    known = causal_language_models()
    if known and not known & {str(name) for name in names}:
        raise CheckpointError(
            f"{file}: the architecture {', '.join(map(str, names))} is not supported: it is not a decoder-only "
            f"language model of {LIBRARY} {version(LIBRARY)}; docs/models.md lists the supported models"
        )


def causal_language_models() -> frozenset[str]:
    """Architectures of causal language models in the installed transformers.

    Empty if its table is not found; then only the engine can tell whether it supports a model.
    """
    # The table is parsed from the source, because importing it takes seconds and needs torch.
    spec = find_spec(LIBRARY)
    folders = [] if spec is None else spec.submodule_search_locations or []
    for folder in folders:
        try:
            tree = ast.parse((Path(folder) / TABLE_FILE).read_text(encoding="utf-8"))
        except (OSError, SyntaxError):
            continue
        return frozenset(_architectures(tree))
    return frozenset()


def _architectures(tree: ast.Module) -> Iterator[str]:
    """The entries of the table, an OrderedDict of (model type, one architecture or a tuple of architectures)."""
    for statement in tree.body:
        match statement:
            case ast.Assign([ast.Name(name)], ast.Call(args=[ast.List(entries)])) if name == TABLE:
                values = (entry.elts[1] for entry in entries if isinstance(entry, ast.Tuple))
                constants = (node for value in values for node in ast.walk(value) if isinstance(node, ast.Constant))
                yield from (str(constant.value) for constant in constants)


def check_draft_model(model: Checkpoint, draft: Checkpoint) -> None:
    """Raises CheckpointError unless both checkpoints have the same token ids for the same tokens."""
    if draft.vocab_size != model.vocab_size:
        raise CheckpointError(
            f"draft_model {draft.name}: vocab_size must be {model.vocab_size}, as in {model.name} "
            f"(got {draft.vocab_size})"
        )
    # Different tokenizer files do not imply different ids: the files may differ in the chat template, for example.
    if draft.tokenizer_fingerprint != model.tokenizer_fingerprint and _tokens(draft) != _tokens(model):
        raise CheckpointError(f"draft_model {draft.name}: its tokenizer has other tokens than that of {model.name}")


def _tokens(checkpoint: Checkpoint) -> dict[str, int]:
    # Imported here, because the command line of an installation without services imports this module too.
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
    except Exception as error:  # The library raises plain Exception.
        raise CheckpointError(f"{checkpoint.tokenizer_file} cannot be read: {error}") from error
    vocabulary: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return vocabulary
