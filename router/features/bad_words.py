"""Texts that outputs must not contain, as the token ids that produce them."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from router.errors import Reason, Violations
from router.parse.model import Limits, ServedModel
from router.parse.sampling import parse_strings
from router.requests.part import Part
from router.text.tokenizer_pool import TokenizerPool
from sluice.v1 import generation_pb2 as pb
from sluice.wire.params import MAX_WORD_TOKENS, MAX_WORDS_TOKENS, SamplingParams

FIELD = "spec.sampling.bad_words"


@dataclass(frozen=True)
class BadWords:
    fields = frozenset({"sampling.bad_words"})

    _model: ServedModel
    _limits: Limits
    _text: TokenizerPool

    async def parse(self, message: pb.GenerationSpec, bad: Violations, _: str) -> "_BadWords":
        limits, words = self._limits, message.sampling.bad_words
        parsed = parse_strings(FIELD, words, limits.bad_words, "bad words", limits.bad_word_bytes, bad)
        return _BadWords(parsed, self._model.vocab_size, self._text)


@dataclass(frozen=True, slots=True)
class _BadWords(Part):
    words: tuple[str, ...]
    vocab_size: int
    text: TokenizerPool = field(compare=False)

    async def sampling(self, sampling: SamplingParams, tenant: str) -> SamplingParams:
        return ban_words(sampling, await self.text.spellings(self.words, tenant), self.vocab_size)


def ban_words(
    sampling: SamplingParams, spellings: Sequence[Sequence[Sequence[int]]], vocab_size: int
) -> SamplingParams:
    """`sampling` with the bad words as token ids. Raises RequestError.

    `spellings`: for each of one or more bad words, the sequences of token ids that produce it. Spellings with a token
    beyond the model's vocabulary are skipped, because the model cannot generate them.
    """
    bad = Violations()
    for i, word_spellings in enumerate(spellings):
        if not all(word_spellings):
            bad.add(f"{FIELD}[{i}]", "has no tokens", reason=Reason.MISSING)
        bad.at_most(f"{FIELD}[{i}]", max(map(len, word_spellings)), MAX_WORD_TOKENS, "tokens")
    words = [tuple(ids) for word_spellings in spellings for ids in word_spellings if ids and max(ids) < vocab_size]
    single = {*sampling.bad_token_ids, *(word[0] for word in words if len(word) == 1)}
    several = dict.fromkeys(word for word in words if len(word) > 1)
    bad.at_most(FIELD, sum(map(len, several)), MAX_WORDS_TOKENS, "tokens in words of several tokens")
    if sampling.allowed_token_ids and single.issuperset(sampling.allowed_token_ids):
        bad.add(
            FIELD, f"bans all {len(sampling.allowed_token_ids)} tokens in allowed_token_ids", reason=Reason.CONFLICT
        )
    if len(single) >= vocab_size:
        bad.add(FIELD, f"bans all {vocab_size} tokens of the vocabulary", reason=Reason.CONFLICT)
    bad.raise_if_any()
    return msgspec.structs.replace(sampling, bad_token_ids=tuple(sorted(single)), bad_words=tuple(several))
