"""Streams whose content is a function of the request alone, from their start or from where a broken one is resumed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from sluice.v1 import generation_pb2 as pb

PROMPT_TOKENS = 5
STOP = "!!"
DRAWN_SEED = 77
"""The seed of requests that have none."""
MODEL = "a1b2"
"""The model's fingerprint."""


@dataclass(frozen=True)
class Tale:
    """One output of a request.

    Every third token is half of a character. Outputs with an odd index end with a stop string of two tokens.
    """

    seed: int
    index: int
    length: int

    @property
    def stops(self) -> bool:
        return self.index % 2 == 1 and self.length > 2

    def token(self, position: int) -> int:
        return (self.seed * 31 + self.index * 17 + position * 7) % 5000

    def text(self, count: int) -> str:
        """The text that was sent after `count` tokens."""
        complete = count == self.length
        if self.stops:
            count = min(count, self.length - len(STOP))
        pieces = [chr(97 + self.token(position) % 26) for position in range(count)]
        if pieces and not complete and count % 3 == 2:
            pieces.pop()
        return "".join(pieces)

    def delta(self, start: int, end: int, with_logprobs: bool) -> pb.Delta:
        ids = [self.token(position) for position in range(start, end)]
        return pb.Delta(
            index=self.index,
            text=self.text(end)[len(self.text(start)) :],
            token_ids=ids,
            logprobs=[pb.TokenLogprob(token_id=token, logprob=-token / 8) for token in ids] if with_logprobs else (),
            token_offset=start,
            token_count=end - start,
        )

    def finished(self, start: int, with_logprobs: bool) -> pb.Finished:
        """`start`: where this attempt began. The cumulative log-probability covers only its tokens."""
        total = sum(-self.token(position) / 8 for position in range(start, self.length))
        return pb.Finished(
            index=self.index,
            finish_reason=pb.FINISH_REASON_STOP_STRING if self.stops else pb.FINISH_REASON_LENGTH,
            stop_string=STOP if self.stops else None,
            completion_tokens=self.length,
            cumulative_logprob=total if with_logprobs else None,
        )


class Rows:
    """The tensor rows that a request returns, without those that its caller has. A row is its token, twice."""

    def __init__(self, spec: pb.GenerationSpec, tales: list[Tale]) -> None:
        resumed = {output.index: output.tensor_rows for output in spec.resume}
        context = [tensor.name for tensor in spec.output.tensors if tensor.context]
        context += ["context_logits"] * spec.output.context_logits
        output = [tensor.name for tensor in spec.output.tensors]
        output += ["generation_logits"] * spec.output.generation_logits
        self._tales = {tale.index: tale for tale in tales}
        self._next = {(0, name, True): spec.resume_context_rows for name in context}
        self._next |= {(tale.index, name, False): resumed.get(tale.index, 0) for tale in tales for name in output}

    def upto(self, index: int, tokens: int, rows: random.Random | None = None) -> Iterator[pb.TensorChunk]:
        """The prompt's rows, and those of the first `tokens` tokens of output `index`, that were not sent yet.

        `rows`: sends only a random part of them.
        """
        for key, start in self._next.items():
            output, name, context = key
            end = PROMPT_TOKENS if context else tokens
            if not context and output != index:
                continue
            if rows is not None:
                end = min(end, start + rows.randint(0, 2))
            if start < end:
                self._next[key] = end
                token = self._tales[output].token
                values = np.array([[token(position)] * 2 for position in range(start, end)], np.float32)
                shape, data = values.shape, values.tobytes()
                yield pb.TensorChunk(
                    index=output, name=name, start=start, context=context, shape=shape, dtype="float32", data=data
                )


def events(spec: pb.GenerationSpec, rows: random.Random) -> Iterator[pb.GenerateStreamResponse]:
    """The complete stream of a request. `rows` decides how outputs are interleaved and split into deltas."""
    for number, event in enumerate(_events(spec, rows), 1):
        event.sequence = number
        yield event


def _events(spec: pb.GenerationSpec, rows: random.Random) -> Iterator[pb.GenerateStreamResponse]:
    seed = spec.sampling.seed if spec.sampling.HasField("seed") else DRAWN_SEED
    tales = [Tale(seed, index, spec.stopping.max_tokens + index) for index in range(spec.n or 1)]
    resumed = {output.index: list(output.token_ids) for output in spec.resume}
    with_logprobs = spec.output.HasField("logprobs")
    event = pb.GenerateStreamResponse
    started = pb.Started(request_id=spec.request_id or "drawn", seed=seed, prompt_tokens=PROMPT_TOKENS)
    started.model_fingerprint = MODEL
    yield event(started=started)
    if spec.output.echo and not resumed:
        for tale in tales:
            yield event(delta=pb.Delta(index=tale.index, text=f"<{spec.text}>"))
    at = {tale.index: len(resumed.get(tale.index, ())) for tale in tales}
    for tale in tales:
        expected = [tale.token(position) for position in range(at[tale.index])]
        assert resumed.get(tale.index, []) == expected, "the request resumes from tokens that were never sent"
    live, tensors = list(tales), Rows(spec, tales)
    while live:
        tale = rows.choice(live)
        start = at[tale.index]
        end = at[tale.index] = min(start + rows.randint(1, 3), tale.length)
        if end > start:
            yield event(delta=tale.delta(start, end, with_logprobs))
        done = end == tale.length
        for chunk in tensors.upto(tale.index, end, None if done else rows):
            yield event(tensor=chunk)
        if done:
            live.remove(tale)
            yield event(finished=tale.finished(len(resumed.get(tale.index, ())), with_logprobs))
    usage = pb.Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=sum(tale.length for tale in tales))
    yield event(done=pb.Done(usage=usage))
