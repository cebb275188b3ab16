"""Joins the chunks of a stream, to compare them with those of another stream."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from sluice.client import Chunk


@dataclass
class JoinedOutput:
    """All chunks of one output."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[Any, ...] = ()
    tokens: int = 0
    tensors: dict[tuple[str, bool], list[Any]] = field(default_factory=dict)
    """Rows by (name, whether they belong to the prompt)."""
    ends: list[Any] = field(default_factory=list)


def join(chunks: Iterable[Chunk]) -> dict[int, JoinedOutput]:
    """The outputs by index. Asserts that there are no gaps or repetitions, and nothing after the end of an output."""
    outputs: dict[int, JoinedOutput] = {}
    for chunk in chunks:
        output = outputs.setdefault(chunk.index, JoinedOutput())
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
