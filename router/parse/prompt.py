"""The prompt as text, token ids, chat or embeddings."""

from dataclasses import dataclass

from router.errors import Reason, Violations
from router.parse.chat import ChatPrompt, parse_chat
from router.parse.model import Limits, ServedModel
from sluice.v1 import generation_pb2 as pb


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str
    size: int
    """Length of the text in bytes."""
    add_special_tokens: bool
    field: str = "spec.text"


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Each id is in the vocabulary, or beyond it and stands for a row of embeddings (see `router.features.tables`)."""

    ids: tuple[int, ...]
    field: str = "spec.token_ids"


Prompt = TextPrompt | IdsPrompt | ChatPrompt


def parse_prompt(spec: pb.GenerationSpec, model: ServedModel, limits: Limits, bad: Violations) -> Prompt:
    """The result must not be used if `bad` has violations."""
    kind = spec.WhichOneof("prompt")
    if kind == "token_ids":
        return _ids(spec, model, limits, bad)
    if kind == "prompt_embeds":
        _check_unchanged(spec, "embeddings", bad)
        # The ids of the rows of embeddings are added to it.
        return IdsPrompt((), "spec.prompt_embeds")
    if kind == "chat":
        return parse_chat(spec, model, limits, bad)
    if kind is None:
        bad.add("spec.prompt", "is unset: set text, token_ids, chat or prompt_embeds", reason=Reason.MISSING)
    size = len(spec.text.encode())
    bad.at_most("spec.text", size, limits.prompt_bytes, "bytes")
    return TextPrompt(spec.text, size, spec.add_special_tokens if spec.HasField("add_special_tokens") else True)


def _ids(spec: pb.GenerationSpec, model: ServedModel, limits: Limits, bad: Violations) -> IdsPrompt:
    field = "spec.token_ids.ids"
    ids: tuple[int, ...] = ()
    if not spec.token_ids.ids:
        bad.add(field, "is empty, must have at least one token", reason=Reason.MISSING)
    # Check before copying: copying millions of ids would block the event loop.
    elif bad.at_most(field, len(spec.token_ids.ids), limits.prompt_ids, "ids"):
        ids = tuple(spec.token_ids.ids)
        # Ids beyond the vocabulary stand for rows: the feature `tables` checks them.
        if not (spec.HasField("prompt_table") or spec.prompt_adapter_id):
            bad.token_ids(field, ids, model.vocab_size)
    _check_unchanged(spec, "token ids", bad)
    return IdsPrompt(ids)


def _check_unchanged(spec: pb.GenerationSpec, what: str, bad: Violations) -> None:
    if spec.HasField("add_special_tokens") and spec.add_special_tokens:
        bad.add(
            "spec.add_special_tokens",
            f"is true, but applies only to text and chat: {what} are used unchanged",
            reason=Reason.CONFLICT,
        )
