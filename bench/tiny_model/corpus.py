"""The source of Python's standard library as training documents, and the batches cut from their tokens."""

import ast
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from bench.tiny_model.tokenizer import END_OF_TEXT

Message = dict[str, str]

# Tests are repetitive; the other folders contain tables and prose rather than code.
_SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "pydoc_data", "encodings", "__pycache__"}
_HELD_OUT_SHARE = 0.03
_CHAT_SHARE = 0.1
_MAX_BODY_LINES = 30
_SYSTEM = "You complete Python code."


@dataclass(frozen=True)
class Corpus:
    """Source files, and chats made from the functions in them."""

    files: tuple[str, ...]
    chats: tuple[tuple[Message, ...], ...]


def read(seed: int) -> tuple[Corpus, Corpus]:
    """Training and held-out corpus, split by file; reproducible for a seed and a Python version."""
    rng = random.Random(seed)
    files = list(_source_files())
    rng.shuffle(files)
    held_out = max(1, round(len(files) * _HELD_OUT_SHARE))
    return _corpus(files[held_out:], rng), _corpus(files[:held_out], rng)


def _source_files() -> Iterator[str]:
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        folders = file.relative_to(root).parts[:-1]
        if _SKIPPED_FOLDERS.isdisjoint(folders):
            yield file.read_text(encoding="utf-8", errors="replace")


def _corpus(files: list[str], rng: random.Random) -> Corpus:
    functions = [function for text in files for function in _functions(text)]
    rng.shuffle(functions)
    budget = _CHAT_SHARE * sum(map(len, files))
    chats = []
    for header, docstring, body in functions:
        budget -= len(header) + len(body)
        if budget < 0:
            break
        chats.append(tuple(_conversation(header, docstring, body, rng)))
    return Corpus(tuple(files), tuple(chats))


def _functions(text: str) -> Iterator[tuple[str, str, str]]:
    """(signature with docstring, first paragraph of the docstring, body) of each short documented function."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # lib2to3 and others ship invalid files as test data
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or len(node.body) < 2:
            continue
        docstring, end = ast.get_docstring(node), node.body[0].end_lineno
        if not docstring or end is None or node.end_lineno is None or not 0 < node.end_lineno - end <= _MAX_BODY_LINES:
            continue
        source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).splitlines(keepends=True)
        head = end - node.lineno + 1
        yield "".join(source[:head]), docstring.split("\n\n")[0], "".join(source[head:]).rstrip()


def _conversation(header: str, docstring: str, body: str, rng: random.Random) -> Iterator[Message]:
    if rng.random() < 0.5:
        yield {"role": "system", "content": _SYSTEM}
    if rng.random() < 0.5:
        yield {"role": "user", "content": f"Complete this function:\n\n{header.rstrip()}"}
        yield {"role": "assistant", "content": body}
    else:
        name = header.removeprefix("def ").split("(")[0]
        yield {"role": "user", "content": f"Write the function `{name}`: {' '.join(docstring.split())}"}
        yield {"role": "assistant", "content": header + body}


def pack(corpus: Corpus, tokenizer: PreTrainedTokenizerFast, seed: int) -> Tensor:
    """All documents in shuffled order, each followed by `<|endoftext|>`: int64 [tokens]."""
    chats = [str(tokenizer.apply_chat_template(list(chat), tokenize=False)) for chat in corpus.chats]
    encoded = tokenizer.backend_tokenizer.encode_batch_fast([text + END_OF_TEXT for text in (*corpus.files, *chats)])
    order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(seed)).tolist()
    return torch.cat([torch.tensor(encoded[index].ids) for index in order])


class Windows:
    """Endless random batches of a token stream. Each epoch cuts the stream at other positions, and in another order."""

    def __init__(self, tokens: Tensor, seed: int) -> None:
        self._tokens = tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._epoch: Iterator[Tensor] = iter(())
        self._length = 0

    def next(self, length: int, count: int) -> Tensor:
        """A batch, int64 [count, length + 1]: inputs and, shifted by one, their targets."""
        if length != self._length:
            self._length, self._epoch = length, iter(())
        batch = next(self._epoch, None)
        if batch is None:
            self._epoch = self._cut(length, count)
            batch = next(self._epoch)
        return batch

    def _cut(self, length: int, count: int) -> Iterator[Tensor]:
        # A different offset in each epoch, so that documents are not always cut at the same tokens.
        offset = int(torch.randint(length, (), generator=self._generator))
        starts = torch.arange(offset, len(self._tokens) - length, length)
        starts = starts[torch.randperm(len(starts), generator=self._generator)]
        yield from _batches(self._tokens, starts, length, count)


def in_order(tokens: Tensor, length: int, count: int) -> Iterator[Tensor]:
    """The stream's complete batches from its start, each int64 [count, length + 1]."""
    return _batches(tokens, torch.arange(0, len(tokens) - length, length), length, count)


def _batches(tokens: Tensor, starts: Tensor, length: int, count: int) -> Iterator[Tensor]:
    for group in starts[: len(starts) // count * count].view(-1, count):
        yield torch.stack([tokens[start : start + length + 1] for start in group.tolist()])
