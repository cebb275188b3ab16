"""Error messages, each with a remedy, for what users often give instead of a checkpoint in Hugging Face layout."""

from pathlib import Path

CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "[each.from_pretrained('{source}').save_pretrained('OUT') for each in (M, T)]\""
)
"""Writes safetensors and tokenizer.json."""
GGUF = (
    "is in GGUF format, which Sluice does not read: give the folder or hub id of the original model "
    "(its page on the hub names it as the base model)"
)
HUB_PAGE = "https://huggingface.co/"
SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def why_no_folder(model: str, path: Path) -> str | None:
    """`model` is neither a folder nor a possible hub id; None: it may be a hub id."""
    if path.is_file():
        if path.suffix == ".gguf":
            return f"{model} {GGUF}"
        return f"{model} is a file: give its folder, {path.parent}"
    if model.startswith(HUB_PAGE):
        return f"{model} is a web page: give its hub id, {'/'.join(model.removeprefix(HUB_PAGE).split('/')[:2])}"
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1 or model.endswith("/"):
        return f"{model!r} is neither a folder here nor a hub id such as Qwen/Qwen3-0.6B"
    return None


def why_not_downloaded(model: str, revision: str | None, error: Exception) -> str:
    """`model` may be a hub id, and huggingface_hub raised this error."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    here = f"there is no folder {model} here, and"
    of = "" if revision is None else f", revision {revision!r},"
    match error:
        case RevisionNotFoundError():
            return f"the model {model} has no revision {revision!r} on the hub"
        case GatedRepoError():
            return f"{model} is gated: ask for access at {HUB_PAGE}{model}, then set HF_TOKEN to a token of yours"
        case RepositoryNotFoundError():
            return f"{here} no model {model} on the hub; for a private one set HF_TOKEN"
        case HFValidationError():
            return f"{here} it cannot be a hub id: {error}"
        case LocalEntryNotFoundError():
            return f"{here} the hub cannot be reached to download the model {model}{of} ({_cause(error)})"
    return f"{here} the model {model}{of} could not be downloaded from the hub: {error}"


def why_incomplete(folder: Path, missing: str) -> str:
    """The folder has no config.json or no tokenizer.json."""
    if any(folder.glob("*.gguf")):
        return f"{folder} {GGUF}"
    slow = [name for name in SLOW_TOKENIZERS if (folder / name).is_file()]
    if missing == "tokenizer.json" and slow:
        return f"{folder} has {slow[0]} but no tokenizer.json. To make one: {CONVERT.format(source=folder)}"
    if (folder / "adapter_config.json").is_file():
        return f"{folder} is a LoRA adapter: give the model that it adapts, merged with it"
    return f"{folder} is not a checkpoint: it has no {missing}"


def why_no_weights(folder: Path) -> str:
    """The folder has no safetensors."""
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{folder} has its weights in {pickled[0]}; Sluice reads safetensors, which run no code. "
            f"To convert: {CONVERT.format(source=folder)}"
        )
    if any(folder.glob("*.gguf")):
        return f"{folder} {GGUF}"
    return (
        f"{folder} has neither model.safetensors nor model.safetensors.index.json; "
        "a model of the hub may have its weights in another format, which Sluice does not download"
    )


def _cause(error: BaseException) -> str:
    """The first line of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]
