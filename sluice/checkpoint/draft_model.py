"""Checks whether one checkpoint can be the draft model of another."""

from sluice.checkpoint.folder import Checkpoint, CheckpointError


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
