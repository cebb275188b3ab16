"""The joined chunks of a stream, to compare with those of another."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sluice.client import Chunk


@dataclass
class Joined:
    """One output."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    tokens: int = 0
    tensors: dict[tuple[str, bool], list[Any]] = field(default_factory=dict)
    """Rows, by name and whether they are the prompt's."""
    ends: list[Any] = field(default_factory=list)


def join(chunks: Iterable[Chunk]) -> dict[int, Joined]:
    """By output. Asserts that every offset and row came once, and nothing after an end."""
    outputs: dict[int, Joined] = {}
    for chunk in chunks:
        output = outputs.setdefault(chunk.index, Joined())
        assert not output.ends
        if (tensor := chunk.tensor) is not None:
            rows = output.tensors.setdefault((tensor.name, tensor.context), [])
            assert tensor.start == len(rows)
            rows += tensor.array().tolist()
            continue
        assert chunk.token_offset == output.tokens
        output.text += chunk.text
        output.token_ids += chunk.token_ids
        output.logprobs += chunk.logprobs
        output.tokens += chunk.token_count
        if chunk.finish_reason is not None:
            end = (chunk.finish_reason, chunk.stop_string, chunk.stop_token_id, chunk.completion_tokens)
            output.ends.append((*end, chunk.cumulative_logprob))
    return outputs
