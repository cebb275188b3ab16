"""The state of a stream over all its attempts, and the request of its next attempt."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import msgspec

from sluice.client.errors import LostEvents, ModelChanged, ServerError
from sluice.client.results import (
    Chunk,
    FinishReason,
    Tensor,
    Timings,
    TokenLogprob,
    Usage,
    read_delta,
    read_finished,
    read_logprobs,
    read_tensor,
    read_timings,
    read_usage,
)
from sluice.client.retries import Retries
from sluice.v1 import generation_pb2 as pb

ENDED_EARLY = (FinishReason.ABORTED, FinishReason.TIME_LIMIT)
LEAST_TIME_LIMIT = timedelta(milliseconds=1)


@dataclass(slots=True)
class OutputSoFar:
    token_ids: list[int] = field(default_factory=list)
    shown: int = 0
    """Number of tokens in chunks that were returned."""
    tail: str = ""
    """Text that was received without tokens, which belongs to the output's end. It is returned only together with the
    end, without which a resumed attempt may continue with different text."""
    echoed: bool = False
    """Whether the echoed prompt was returned."""
    cumulative_logprob: float = 0.0
    ended: bool = False


class ReceivedRows:
    """Counts the rows of each tensor over all attempts, so that each row is returned once, in order."""

    def __init__(self, spec: pb.GenerationSpec) -> None:
        self._names = [tensor.name for tensor in spec.output.tensors]
        self._names += ["generation_logits"] * spec.output.generation_logits
        context = [tensor.name for tensor in spec.output.tensors if tensor.context]
        context += ["context_logits"] * spec.output.context_logits
        self._context = dict.fromkeys(context, spec.resume_context_rows)
        self._outputs = {output.index: dict.fromkeys(self._names, output.tensor_rows) for output in spec.resume}

    @property
    def context(self) -> int:
        """Number of rows received of all tensors of the prompt."""
        return min(self._context.values(), default=0)

    def output(self, index: int) -> int:
        """Number of rows received of all tensors of an output."""
        rows = self._outputs.get(index, {})
        return min((rows.get(name, 0) for name in self._names), default=0)

    def new(self, tensor: Tensor) -> Tensor | None:
        """The rows of a part that were not received before; None if all of them were.

        Raises LostEvents if rows before the part are missing.
        """
        received = self._context if tensor.context else self._outputs.setdefault(tensor.index, {})
        next_row, end = received.get(tensor.name, 0), tensor.start + tensor.shape[0]
        if end <= next_row:
            return None
        if tensor.start > next_row:
            raise LostEvents(f"tensor {tensor.name} lost rows: expected row {next_row} (got {tensor.start})")
        received[tensor.name] = end
        row_bytes, rows = len(tensor.data) // tensor.shape[0], end - next_row
        return replace(tensor, start=next_row, shape=(rows, *tensor.shape[1:]), data=tensor.data[-rows * row_bytes :])

    def check_complete(self, index: int, prompt_tokens: int, tokens: int) -> None:
        """Raises LostEvents unless the rows of the prompt, and of the output's `tokens`, were received."""
        _check_rows(self._context, list(self._context), prompt_tokens)
        _check_rows(self._outputs.get(index, {}), self._names, tokens)


class StreamState:
    """Turns the events of all attempts into the chunks of one uninterrupted stream. Does no I/O and has no clock.

    Every stream requests token ids, which are needed to resume. They are hidden unless the caller requested them.
    """

    def __init__(self, spec: pb.GenerationSpec, retries: Retries) -> None:
        self.request_id = ""
        self.seed: int | None = None
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.prompt_logprobs: tuple[TokenLogprob, ...] = ()
        self.prompt_tail = ""
        self.usage: Usage | None = None
        self.timings: Timings | None = None
        self.resumed = 0
        """Times that the stream was resumed."""
        self._retries = retries
        retries.engine_deaths = spec.engine_deaths
        self._spec = spec
        self._shows_ids = spec.output.token_ids
        self._time_limit = spec.time_limit.ToTimedelta() if spec.HasField("time_limit") else None
        self._count = spec.n if spec.HasField("n") else 1
        self._outputs = {each.index: OutputSoFar(list(each.token_ids), len(each.token_ids)) for each in spec.resume}
        self._rows = ReceivedRows(spec)
        self._model = next((each.model_fingerprint for each in spec.resume), "")
        self._begun = False
        self._events = 0
        spec.output.token_ids = True

    @property
    def complete(self) -> bool:
        """Whether the stream has ended without an error."""
        return self.usage is not None

    def request(self, now: float) -> pb.GenerateStreamRequest:
        """Begin an attempt that continues after everything that was received, and return its request."""
        # The server numbers the events of each attempt from 1, and repeats text without tokens.
        self._events = 0
        for output in self._outputs.values():
            output.tail = ""
        if self._begun:
            del self._spec.resume[:]
            for index, output in sorted(self._outputs.items()):
                # A beam search starts again. Each output is a single event, so the known ones are merely repeated.
                if output.token_ids and self._spec.sampling.beam_search.width <= 1:
                    self._spec.resume.add(
                        index=index,
                        token_ids=output.token_ids,
                        tensor_rows=self._rows.output(index),
                        model_fingerprint=self._model,
                    )
            self._spec.resume_context_rows = self._rows.context
        self._spec.engine_deaths = self._retries.engine_deaths
        if self._time_limit is not None:
            # The server rejects a limit of 0, so an expired limit is sent as the shortest possible one.
            left = self._time_limit - timedelta(seconds=self._retries.elapsed(now))
            self._spec.time_limit.FromTimedelta(max(left, min(LEAST_TIME_LIMIT, self._time_limit)))
        return pb.GenerateStreamRequest(spec=self._spec)

    def end_early(self) -> bool:
        """End a broken stream of which only the usage is missing. Returns whether the stream is complete."""
        if self._all_ended():
            self.usage = Usage(self.prompt_tokens, self._completion_tokens(), self.cached_tokens, 0)
        return self.complete

    def on_event(self, event: pb.GenerateStreamResponse) -> list[Chunk]:
        """Apply an event and return its chunks; none for an event that only newer servers send.

        Raises LostEvents, ServerError, ModelChanged.
        """
        self._events += 1
        if event.sequence != self._events:
            raise LostEvents(f"the stream lost events: expected number {self._events} (got {event.sequence})")
        match event.WhichOneof("event"):
            case "delta":
                return self._delta(event.delta)
            case "finished":
                return self._finished(event.finished)
            case "tensor":
                return self._tensor(read_tensor(event.tensor))
            case "started":
                self._started(event.started)
            case "done":
                self._done(event.done)
        return []

    def _started(self, started: pb.Started) -> None:
        self._retries.on_admitted()
        # The server checks the model if there are tokens to resume after, but not if there are only rows of tensors.
        if self._rows.context and self._model not in ("", started.model_fingerprint):
            raise ModelChanged("the stream broke after rows of tensors, and a different model would compute the rest")
        self._model = started.model_fingerprint
        if self._begun:
            # The first attempt's counts remain valid; the prompt of this attempt includes the tokens so far.
            self.resumed += 1
            return
        self._begun = True
        # The next attempt uses the same id and seed, even if the server chose them, so that it continues the same text.
        self.request_id = self._spec.request_id = started.request_id
        self.seed = self._spec.sampling.seed = started.seed
        self.prompt_tokens = started.prompt_tokens
        self.cached_tokens = started.cached_tokens
        self.prompt_logprobs = read_logprobs(started.prompt_logprobs)
        self.prompt_tail = started.prompt_tail

    def _delta(self, delta: pb.Delta) -> list[Chunk]:
        output, ids = self._output(delta.index), delta.token_ids[:]
        known, offset, count = len(output.token_ids), delta.token_offset, delta.token_count
        if count != len(ids):
            raise ServerError(f"a delta of {count} tokens came with {len(ids)} token ids")
        end = offset + count
        # Skip tokens that were received before the stream broke.
        if output.ended or end < known or (end == known and count):
            return []
        if offset != known:
            raise LostEvents(f"output {delta.index} lost tokens: expected offset {known} (got {offset})")
        if not count:
            return self._on_text_without_tokens(output, delta)
        self._retries.on_progress()
        output.token_ids += ids
        return self._show(output, delta, ids)

    def _tensor(self, tensor: Tensor) -> list[Chunk]:
        new = self._rows.new(tensor)
        if new is None:
            return []
        self._retries.on_progress()
        return [Chunk(index=tensor.index, tensor=new)]

    def _on_text_without_tokens(self, output: OutputSoFar, delta: pb.Delta) -> list[Chunk]:
        """Apply the echoed prompt, before the first token, or text that the server held back until the end."""
        if output.token_ids:
            output.tail += delta.text
            return []
        repeated, output.echoed = output.echoed, True
        return [] if repeated else [read_delta(delta)]

    def _show(self, output: OutputSoFar, delta: pb.Delta, new: Sequence[int]) -> list[Chunk]:
        entries = delta.logprobs
        logprobs = read_logprobs(entries) if entries else ()
        for entry in logprobs:
            output.cumulative_logprob += entry.logprob or 0.0
        text, output.tail = output.tail + delta.text, ""
        # Tokens without text are counted with the next text, as the server does for callers that request no ids.
        if not (text or logprobs or self._shows_ids):
            return []
        return [self._next_chunk(output, delta.index, text, tuple(new) if self._shows_ids else (), logprobs)]

    def _next_chunk(
        self,
        output: OutputSoFar,
        index: int,
        text: str,
        ids: tuple[int, ...] = (),
        logprobs: tuple[TokenLogprob, ...] = (),
    ) -> Chunk:
        offset, output.shown = output.shown, len(output.token_ids)
        return Chunk(index, text, ids, logprobs, offset, output.shown - offset)

    def _finished(self, finished: pb.Finished) -> list[Chunk]:
        output = self._output(finished.index)
        if output.ended:
            return []
        if finished.completion_tokens > len(output.token_ids):
            known = len(output.token_ids)
            raise LostEvents(f"output {finished.index} lost tokens: got {known} of {finished.completion_tokens}")
        end = read_finished(finished)
        if end.finish_reason not in ENDED_EARLY:
            self._rows.check_complete(finished.index, self.prompt_tokens, finished.completion_tokens)
        output.ended = True
        self._retries.on_progress()
        # The server's sum covers only the tokens of the last attempt.
        if self.resumed and end.cumulative_logprob is not None and self._spec.output.HasField("logprobs"):
            end = msgspec.structs.replace(end, cumulative_logprob=output.cumulative_logprob)
        if output.tail or output.shown < len(output.token_ids):
            return [self._next_chunk(output, finished.index, output.tail), end]
        return [end]

    def _done(self, done: pb.Done) -> None:
        if not self._all_ended():
            raise LostEvents("the stream ended before all of its outputs had ended")
        usage = read_usage(done.usage)
        self.usage = replace(usage, completion_tokens=self._completion_tokens()) if self.resumed else usage
        self.timings = read_timings(done.timings) if done.HasField("timings") else None

    def _all_ended(self) -> bool:
        return sum(output.ended for output in self._outputs.values()) == self._count

    def _completion_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self._outputs.values())

    def _output(self, index: int) -> OutputSoFar:
        if index >= self._count:
            raise ServerError(f"the stream has an output {index}, but only {self._count} outputs were requested")
        output = self._outputs.get(index)
        if output is None:
            output = self._outputs[index] = OutputSoFar()
        return output


def _check_rows(known: Mapping[str, int], names: list[str], rows: int) -> None:
    for name in names:
        if known.get(name, 0) < rows:
            raise LostEvents(f"tensor {name} lost rows: got {known.get(name, 0)} of {rows}")
