"""Log-probabilities in the formats of chats and completions."""

from collections.abc import Iterable, Sequence

from gateway.answers.objects import ChatLogprobs, ChatToken, CompletionLogprobs, TopToken
from gateway.answers.text_offsets import TextOffsets
from sluice.client import TokenLogprob


def of_chat(entries: Sequence[TokenLogprob]) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatToken(
                text_of(entry.token), entry.logprob or 0.0, list(entry.token), [_top(token) for token in entry.top]
            )
            for entry in entries
        ]
    )


def of_completion(entries: Sequence[TokenLogprob], top: int, offsets: TextOffsets) -> CompletionLogprobs:
    """`top`: number of alternatives requested per token; `offsets`: knows the text and the tokens before these."""
    columns = CompletionLogprobs([], [], [] if top else None, [])
    for entry in entries:
        columns.tokens.append(text_of(entry.token))
        columns.token_logprobs.append(entry.logprob)
        columns.text_offset.append(offsets.place(entry.token, omitted=entry.omitted))
        if columns.top_logprobs is not None:
            columns.top_logprobs.append(_ranked(entry))
    return columns


def of_prompt(entries: Iterable[TokenLogprob]) -> list[dict[str, float] | None]:
    return [_ranked(entry) for entry in entries]


def text_of(token: bytes) -> str:
    """The token's text, or OpenAI's notation `bytes:\\xe3\\x81` if the token is only a part of a character."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)


def _ranked(entry: TokenLogprob) -> dict[str, float] | None:
    """Log-probabilities by text: of the most likely tokens and of the actual one. None for the first token of a
    prompt, which has no log-probability."""
    if entry.logprob is None:
        return None
    ranked: dict[str, float] = {}
    for token in (*entry.top, entry):
        if token.logprob is not None:
            # Of tokens with the same text, the most likely counts: clients compare the actual token with the maximum.
            text = text_of(token.token)
            ranked[text] = max(token.logprob, ranked.get(text, token.logprob))
    return ranked


def _top(entry: TokenLogprob) -> TopToken:
    return TopToken(text_of(entry.token), entry.logprob or 0.0, list(entry.token))
