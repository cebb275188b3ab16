"""Whether one checkpoint can draft for another."""

from sluice.ring.checkpoint import Checkpoint, CheckpointError


def check_draft_model(model: Checkpoint, draft: Checkpoint) -> None:
    """Raises CheckpointError unless both have the same token ids for the same tokens."""
    if draft.vocab_size != model.vocab_size:
        raise CheckpointError(
            f"draft_model {draft.name}: vocab_size must be {model.vocab_size}, as in {model.name} "
            f"(got {draft.vocab_size})"
        )
    # Other files of a tokenizer, such as the chat template, change no token's id.
    if draft.tokenizer_fingerprint != model.tokenizer_fingerprint and _tokens(draft) != _tokens(model):
        raise CheckpointError(f"draft_model {draft.name}: its tokenizer has other tokens than that of {model.name}")


def _tokens(checkpoint: Checkpoint) -> dict[str, int]:
    # Here, because the command line of an installation without services imports this module too.
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(checkpoint.tokenizer_file))
    except Exception as error:  # the library raises nothing more specific
        raise CheckpointError(f"{checkpoint.tokenizer_file} cannot be read: {error}") from error
    found: dict[str, int] = tokenizer.get_vocab(with_added_tokens=True)
    return found
