"""Turns a request's log into the messages of its response, and writes them to the client."""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import cast

from router.api.watchdog import Watchdog
from router.errors import RequestError, duration
from router.requests.request_state import RequestState
from router.requests.token_log import NO_TIMES, SequenceLog
from sluice.checkpoint.vocabulary import Vocabulary
from sluice.v1 import generation_pb2 as pb
from sluice.wire.errors import ErrorCode, FinishReason
from sluice.wire.params import derive_seed
from sluice.wire.prompt_logprobs import Row
from sluice.wire.rows import End
from sluice.wire.tensors import TensorRows

BUILT_AT_ONCE = 512
"""Log-probabilities of a prompt that are built before yielding to other tasks of the event loop."""
Write = Callable[[bytes], Awaitable[None]]


async def write_stream(
    request: RequestState, builder: "ResponseBuilder", write: Write, watchdog: Watchdog, prompt_text: str
) -> None:
    """Write the events of one request: Started, Delta…, Finished per output, Done; numbered from 1.

    Each delta has all text since the previous one. `prompt_text` precedes the text of each echoing output.

    Raises the request's RequestError, and SLOW_CLIENT if one write takes longer than the watchdog allows. If the error
    occurs before the start, nothing has been written, not even metadata, so that a client's retry policy applies.
    """
    log, number = request.log, 0

    async def send(event: pb.GenerateStreamResponse) -> None:
        nonlocal number
        number += 1
        event.sequence = number
        guard.begin()
        await write(event.SerializeToString())
        guard.end()

    with watchdog.guard(lambda: _slow_client(watchdog.seconds)) as guard:
        await log.wait_until(lambda: log.can_start or log.complete)
        await send(pb.GenerateStreamResponse(started=await builder.started()))
        for sequence in log.sequences if prompt_text else ():
            if request.spec.echoes(sequence.index):
                await send(pb.GenerateStreamResponse(delta=pb.Delta(index=sequence.index, text=prompt_text)))
        while True:
            while (updated := log.next_updated()) is not None:
                for event in builder.update(updated):
                    await send(event)
            if log.complete:
                break
            if log.fault is not None:
                raise log.fault
            await log.changed()
        await send(pb.GenerateStreamResponse(done=builder.done()))


def _slow_client(seconds: float) -> RequestError:
    return RequestError(ErrorCode.SLOW_CLIENT, f"the client read nothing for {seconds:g} s")


class ResponseBuilder:
    """Builds the messages of one request, stream or unary."""

    def __init__(self, request: RequestState, vocabulary: Vocabulary) -> None:
        self._request = request
        self._spec = request.spec
        self._vocabulary = vocabulary
        text = request.spec.text
        self._with_logprobs = request.spec.logprobs is not None
        self._omitted: frozenset[int] = frozenset()
        """Ids of the special tokens that the text omits, for log-probabilities."""
        if self._with_logprobs or request.log.prompt is not None:
            self._omitted = vocabulary.omitted_ids(text.skip_special_tokens, text.keep_special_tokens)
        self._with_sum = request.spec.sampling.logprobs is not None

    async def started(self) -> pb.Started:
        started, model, prompt_logprobs = (
            self._request.log.started,
            self._request.began.fingerprint,
            self._prompt_rows(),
        )
        # Mark before the first await: from here on, another attempt must use the same model and does not send the
        # log-probabilities again.
        self._request.log.mark_start_delivered()
        return pb.Started(
            request_id=self._spec.request_id,
            prompt_tokens=len(self._request.prompt),
            cached_tokens=started.cached_tokens if started else 0,
            prompt_logprobs=await self._prompt_logprobs(prompt_logprobs),
            seed=self._spec.sampling.seed,
            model_fingerprint=model,
            prompt_tail=self._prompt_tail(),
        )

    def update(self, sequence: SequenceLog) -> Iterator[pb.GenerateStreamResponse]:
        """Events for everything that has arrived for this sequence since its last update."""
        # Read the end first: rows may be appended while the delta is written, and an end must follow all of its text.
        end = sequence.end
        # Fill the event's delta in place: a separate Delta would be copied into the event.
        event = pb.GenerateStreamResponse()
        if self._fill(event.delta, sequence):
            self._request.on_first_delta()
            yield event
        for part in self._request.log.take_tensors(sequence):
            yield pb.GenerateStreamResponse(tensor=_tensor(part))
        if end is None:
            return
        if end.held:
            # The text that the detokenizer held back until the end.
            held = pb.Delta(index=sequence.index, text=end.held, token_offset=sequence.received)
            yield pb.GenerateStreamResponse(delta=held)
        yield pb.GenerateStreamResponse(finished=self.finished(sequence, end))

    def _fill(self, delta: pb.Delta, sequence: SequenceLog) -> bool:
        """Fill `delta` with everything since the sequence's last delta. False if there is nothing to show yet."""
        count = sequence.received - sequence.delivered
        text = "".join(sequence.text)
        # Tokens without text are counted by the next delta; the last delta counts the rest.
        shown = sequence.end is not None or self._spec.token_ids or sequence.logprobs
        if not text and not (count and shown):
            return False
        # Zero is the default and need not be set.
        if sequence.index:
            delta.index = sequence.index
        delta.text = text
        delta.token_offset = sequence.delivered
        delta.token_count = count
        if self._spec.token_ids:
            delta.token_ids.extend(sequence.undelivered_ids)
        if sequence.logprobs:
            delta.logprobs.extend(self._logprobs(sequence))
        self._request.log.mark_delivered(sequence)
        return True

    def finished(self, sequence: SequenceLog, end: End) -> pb.Finished:
        finished = pb.Finished(
            index=sequence.index,
            finish_reason=_reason(end),
            completion_tokens=sequence.received,
            cumulative_logprob=sequence.cumulative if self._with_sum else None,
        )
        _set_matched_stop(finished, end)
        return finished

    def done(self) -> pb.Done:
        return pb.Done(usage=self._usage(), timings=self._timings())

    async def response(self, prompt_text: str) -> pb.GenerateResponse:
        """The unary response, once every sequence has ended."""
        sequences = self._request.log.sequences
        response = pb.GenerateResponse(
            request_id=self._spec.request_id,
            outputs=[
                self._output(index, sequence, sequence.end, prompt_text)
                for index, sequence in enumerate(self._outputs())
                if sequence.end is not None
            ],
            usage=self._usage(),
            timings=self._timings(),
            prompt_logprobs=await self._prompt_logprobs(self._prompt_rows()),
            prompt_tail=self._prompt_tail(),
        )
        for sequence in sequences:
            self._request.log.mark_delivered(sequence)
        response.tensors.extend(
            whole_tensors(part for sequence in sequences for part in self._request.log.take_tensors(sequence))
        )
        return response

    def _outputs(self) -> list[SequenceLog]:
        """The sequences to return: all of them, or the most likely ones, best first."""
        sequences, count = self._request.log.sequences, self._spec.num_outputs
        return sequences if count == len(sequences) else sorted(sequences, key=_by_likelihood)[:count]

    def _output(self, index: int, sequence: SequenceLog, end: End, prompt_text: str) -> pb.Output:
        output = pb.Output(
            index=index,
            text=(prompt_text if self._spec.echoes(sequence.index) else "") + "".join(sequence.text) + end.held,
            token_ids=sequence.undelivered_ids if self._spec.token_ids else (),
            logprobs=self._logprobs(sequence) if self._with_logprobs else (),
            finish_reason=_reason(end),
            seed=derive_seed(self._spec.sampling.seed, sequence.index),
            cumulative_logprob=sequence.cumulative if self._with_sum else None,
        )
        _set_matched_stop(output, end)
        return output

    def _prompt_tail(self) -> str:
        count = self._spec.prompt_tail
        return self._vocabulary.prompt_text(self._request.prompt[-count:], False) if count else ""

    def _prompt_rows(self) -> Iterator[Row] | None:
        log = self._request.log.prompt
        return None if log is None else log.rows()

    async def _prompt_logprobs(self, rows: Iterator[Row] | None) -> list[pb.TokenLogprob]:
        """One per prompt token if requested; fewer if the request ended early. The first token has no value."""
        if rows is None:
            return []
        prompt = self._request.prompt
        first = prompt[0]
        text, omitted = self._vocabulary.bytes_of(first), first in self._omitted
        logprobs = [pb.TokenLogprob(token_id=first, token=text, omitted=omitted)]
        for token, (logprob, rank, best) in zip(prompt[1:], rows, strict=False):
            top = [self._logprob(top_token, value, top_rank) for top_rank, (top_token, value) in enumerate(best, 1)]
            logprobs.append(self._logprob(token, logprob, rank, top, omitted=token in self._omitted))
            if len(logprobs) % BUILT_AT_ONCE == 0:
                await asyncio.sleep(0)
        return logprobs

    def _logprobs(self, sequence: SequenceLog) -> list[pb.TokenLogprob]:
        logprobs = []
        for token, entry in zip(sequence.undelivered_ids, sequence.logprobs, strict=False):
            top = [self._logprob(top_token, logprob, rank) for rank, (top_token, logprob) in enumerate(entry.top, 1)]
            omitted = token in self._omitted
            logprobs.append(self._logprob(token, entry.logprob, entry.rank, top, omitted=omitted))
        return logprobs

    def _logprob(
        self, token: int, logprob: float, rank: int, top: Sequence[pb.TokenLogprob] = (), *, omitted: bool = False
    ) -> pb.TokenLogprob:
        text = self._vocabulary.bytes_of(token)
        return pb.TokenLogprob(token_id=token, token=text, logprob=logprob, rank=rank, top=top, omitted=omitted)

    def _usage(self) -> pb.Usage:
        request, started = self._request, self._request.log.started
        return pb.Usage(
            prompt_tokens=len(request.prompt),
            completion_tokens=sum(sequence.received for sequence in request.log.sequences),
            cached_tokens=started.cached_tokens if started else 0,
            accepted_draft_tokens=sum(sequence.accepted for sequence in request.log.sequences),
        )

    def _timings(self) -> pb.Timings | None:
        if not self._spec.timings:
            return None
        request = self._request
        all_times = [sequence.end.times for sequence in request.log.sequences if sequence.end] or [NO_TIMES]
        queue = (request.submitted or request.arrived) - request.arrived + min(times.queue for times in all_times)
        context = min(times.context for times in all_times)
        first = request.first_token_seconds
        return pb.Timings(
            queue=duration(queue),
            prefill=duration(context),
            decode=duration(max(times.generation for times in all_times)),
            time_to_first_token=duration(queue + context if first is None else first),
        )


def _by_likelihood(sequence: SequenceLog) -> tuple[bool, float, int]:
    """Sort key: most likely first. Sequences that were stopped early come last: being short, they would look likely."""
    stopped = sequence.end is None or sequence.end.reason in (FinishReason.ABORTED, FinishReason.TIME_LIMIT)
    # NaN would make the order undefined, so it counts as least likely.
    likelihood = -math.inf if math.isnan(sequence.cumulative) else sequence.cumulative
    return stopped, -likelihood, sequence.index


def whole_tensors(parts: Iterable[TensorRows]) -> Iterator[pb.TensorChunk]:
    """Joins the parts of each tensor into one chunk."""
    tensors: dict[tuple[int, str, bool], list[TensorRows]] = {}
    for part in parts:
        tensors.setdefault((part.sequence, part.name, part.context), []).append(part)
    for tensor in tensors.values():
        chunk = _tensor(tensor[0])
        chunk.shape[0] = sum(part.rows for part in tensor)
        chunk.data = b"".join(part.data for part in tensor)
        yield chunk


def _tensor(part: TensorRows) -> pb.TensorChunk:
    return pb.TensorChunk(
        index=part.sequence,
        name=part.name,
        start=part.start,
        context=part.context,
        shape=part.shape,
        dtype=part.dtype,
        data=bytes(part.data),
    )


def _reason(end: End) -> pb.FinishReason.ValueType:
    """The ring uses the API's numbers. ERROR never occurs here, because it fails the request."""
    return cast(pb.FinishReason.ValueType, int(end.reason))


def _set_matched_stop(message: pb.Finished | pb.Output, end: End) -> None:
    if end.reason is FinishReason.STOP_STRING and end.stop_string is not None:
        message.stop_string = end.stop_string
    elif end.reason is FinishReason.STOP_TOKEN and end.stop_token is not None:
        message.stop_token_id = end.stop_token
