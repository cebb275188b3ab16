"""Log-probabilities in the formats of chats and completions."""

from collections.abc import Iterable, Sequence

from gateway.answers.objects import ChatLogprobs, ChatToken, CompletionLogprobs, TopToken
from sluice.client import TokenLogprob


def of_chat(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatToken(_text(entry), entry.logprob or 0.0, list(entry.token), [_top(token) for token in entry.top])
            for entry in entries
        ]
    )


def of_completion(entries: Sequence[TokenLogprob], top: int, offset: int = 0) -> CompletionLogprobs:
    """`top`: number of alternatives requested per token; `offset`: number of characters before the first entry."""
    columns = CompletionLogprobs([], [], [] if top else None, [])
    for entry in entries:
        text = _text(entry)
        columns.tokens.append(text)
        columns.token_logprobs.append(entry.logprob)
        columns.text_offset.append(offset)
        offset += len(text)
        if columns.top_logprobs is not None:
            columns.top_logprobs.append(_ranked(entry))
    return columns


def of_prompt(entries: Iterable[TokenLogprob]) -> list[dict[str, float] | None]:
    return [_ranked(entry) for entry in entries]


def _ranked(entry: TokenLogprob) -> dict[str, float] | None:
    """Log-probabilities by text: of the most likely tokens and of the actual one. None for the first token of a
    prompt, which has no log-probability."""
    if entry.logprob is None:
        return None
    top = {_text(token): token.logprob for token in entry.top if token.logprob is not None}
    return top | {_text(entry): entry.logprob}


def _top(entry: TokenLogprob) -> TopToken:
    return TopToken(_text(entry), entry.logprob or 0.0, list(entry.token))


def _text(entry: TokenLogprob) -> str:
    return entry.token.decode("utf-8", "replace")
