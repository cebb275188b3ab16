"""Log-probabilities in the forms of chats and of completions."""

from collections.abc import Iterable, Sequence

from gateway.answers.objects import ChatLogprobs, ChatToken, CompletionLogprobs, TopToken
from sluice.client import TokenLogprob


def of_chat(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatToken(_text(each), each.logprob or 0.0, list(each.token), [_top(other) for other in each.top])
            for each in entries
        ]
    )


def of_completion(entries: Sequence[TokenLogprob], top: int, offset: int = 0) -> CompletionLogprobs:
    """`top`: how many were asked for; `offset`: characters before the first of them."""
    found = CompletionLogprobs([], [], [] if top else None, [])
    for each in entries:
        text = _text(each)
        found.tokens.append(text)
        found.token_logprobs.append(each.logprob)
        found.text_offset.append(offset)
        offset += len(text)
        if found.top_logprobs is not None:
            found.top_logprobs.append(_ranked(each))
    return found


def of_prompt(entries: Iterable[TokenLogprob]) -> list[dict[str, float] | None]:
    return [_ranked(each) for each in entries]


def _ranked(entry: TokenLogprob) -> dict[str, float] | None:
    """By text, the most likely ones and the one that is there; None: the first token of a prompt has none."""
    if entry.logprob is None:
        return None
    found = {_text(each): each.logprob for each in entry.top if each.logprob is not None}
    return found | {_text(entry): entry.logprob}


def _top(entry: TokenLogprob) -> TopToken:
    return TopToken(_text(entry), entry.logprob or 0.0, list(entry.token))


def _text(entry: TokenLogprob) -> str:
    return entry.token.decode("utf-8", "replace")
