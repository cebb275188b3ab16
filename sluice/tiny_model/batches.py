"""Token streams cut into windows."""

from collections.abc import Iterator

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from sluice.tiny_model.corpus import Corpus
from sluice.tiny_model.tokenizer import END_OF_TEXT


def pack(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> Tensor:
    """All documents in shuffled order, each followed by `<|endoftext|>`: int64 [tokens]."""
    chats = [str(tokenizer.apply_chat_template(list(chat), tokenize=False)) for chat in corpus.chats]
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([text + END_OF_TEXT for text in (*corpus.files, *chats)])
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.cat([torch.tensor(encoded[index].ids) for index in order])


class Windows:
    """Endless random batches of a token stream: each epoch cuts it anew, in a new order."""

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self._tokens = tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch: Iterator[Tensor] = iter(())
        self._length = 0

    def next(self, length: int, count: int) -> Tensor:
        """int64 [count, length + 1]: inputs and, shifted by one, their targets."""
        if length != self._length:
            self._length, self._epoch = length, iter(())
        batch = next(self._epoch, None)
        if batch is None:
            self._epoch = self._cut(length, count)
            batch = next(self._epoch)
        return batch

    def _cut(self, length: int, count: int) -> Iterator[Tensor]:
        offset = int(torch.randint(length, (), generator=self._generator))
        starts = torch.arange(offset, len(self._tokens) - length, length)
        starts = starts[torch.randperm(len(starts), generator=self._generator)]
        for group in starts[: len(starts) // count * count].view(-1, count):
            yield torch.stack([self._tokens[start : start + length + 1] for start in group.tolist()])


def in_order(tokens: Tensor, length: int, count: int) -> Iterator[Tensor]:
    """Complete batches of the stream from its start: int64 [count, length + 1] each."""
    starts = torch.arange(0, len(tokens) - length, length)
    for group in starts[: len(starts) // count * count].view(-1, count):
        yield torch.stack([tokens[start : start + length + 1] for start in group.tolist()])
