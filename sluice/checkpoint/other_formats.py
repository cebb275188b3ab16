"""Error messages with remedies for what users often pass instead of a checkpoint in Hugging Face layout."""

from pathlib import Path

from sluice.checkpoint.peft import CONFIG

CONVERT = (
    'python -c "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T; '
    "[each.from_pretrained('{source}').save_pretrained('OUT') for each in (M, T)]\""
)
"""A command that writes safetensors and tokenizer.json."""
GGUF = "is a GGUF file: use `sluice serve`, or convert it with `sluice convert FILE.gguf FOLDER`"
HUB_PAGE = "https://huggingface.co/"
SLOW_TOKENIZERS = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "vocab.json", "vocab.txt")


def why_no_folder(model: str, path: Path) -> str | None:
    """The error for a `model` that is neither a folder nor a possible Hugging Face id. None if it may be an id."""
    if path.is_file():
        if path.suffix == ".gguf":
            return f"{model} {GGUF}"
        return f"{model} is a file: use its folder, {path.parent}"
    if model.startswith(HUB_PAGE):
        hub_id = "/".join(model.removeprefix(HUB_PAGE).split("/")[:2])
        return f"{model} is a web page: use the model's Hugging Face id, {hub_id}"
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1 or model.endswith("/"):
        return f"{model!r} is neither a folder on this machine nor a Hugging Face id such as Qwen/Qwen3-0.6B"
    return None


def why_not_downloaded(model: str, revision: str | None, error: Exception) -> str:
    """The error for a `model` whose download from Hugging Face raised `error`."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    no_folder = f"there is no folder {model} on this machine, and"
    of_revision = "" if revision is None else f", revision {revision!r},"
    match error:
        case RevisionNotFoundError():
            return f"the model {model} has no revision {revision!r} on Hugging Face"
        case GatedRepoError():
            return f"{model} is gated: request access at {HUB_PAGE}{model}, then set HF_TOKEN to your token"
        case RepositoryNotFoundError():
            return f"{no_folder} no model {model} on Hugging Face; if it is private, set HF_TOKEN to your token"
        case HFValidationError():
            return f"{no_folder} it is not a valid Hugging Face id: {error}"
        case LocalEntryNotFoundError():
            cause = _cause(error)
            return f"{no_folder} Hugging Face cannot be reached to download the model {model}{of_revision} ({cause})"
    return f"{no_folder} the model {model}{of_revision} could not be downloaded from Hugging Face: {error}"


def why_incomplete(folder: Path, missing: str) -> str:
    """The error for a folder without `missing`, which is config.json or tokenizer.json."""
    if (file := next(folder.glob("*.gguf"), None)) is not None:
        return f"{file} {GGUF}"
    slow = [name for name in SLOW_TOKENIZERS if (folder / name).is_file()]
    if missing == "tokenizer.json" and slow:
        return f"{folder} has {slow[0]} but no tokenizer.json. To create it: {CONVERT.format(source=folder)}"
    if (folder / CONFIG).is_file():
        return f"{folder} is a LoRA adapter: serve its base model, and load the adapter into it (docs/lora.md)"
    return f"{folder} is not a checkpoint: it has no {missing}"


def why_no_weights(folder: Path) -> str:
    """The error for a folder without safetensors."""
    pickled = sorted(file.name for file in folder.glob("pytorch_model*.bin"))
    if pickled:
        return (
            f"{folder} has its weights in {pickled[0]}; Sluice only reads safetensors, which cannot execute code. "
            f"To convert: {CONVERT.format(source=folder)}"
        )
    if (file := next(folder.glob("*.gguf"), None)) is not None:
        return f"{file} {GGUF}"
    return (
        f"{folder} has neither model.safetensors nor model.safetensors.index.json; "
        "if it was downloaded, the model's weights may be in another format, which Sluice does not support"
    )


def _cause(error: BaseException) -> str:
    """The first line of the root cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error).splitlines() or [type(error).__name__])[0]
