"""What has come of a request, as messages of the public API."""

from collections.abc import Sequence
from typing import cast

from router.errors import duration
from router.requests.registry import RequestState
from router.requests.token_log import NO_TIMES, SequenceLog
from sluice.ring.errors import FinishReason
from sluice.ring.params import derive_seed
from sluice.ring.vocabulary import Vocabulary
from sluice.ring.wire import End, TokenLogprob
from sluice.v1 import generation_pb2 as pb


class ResponseBuilder:
    """Builds the messages of one request."""

    def __init__(self, live: RequestState, vocabulary: Vocabulary) -> None:
        self._live = live
        self._spec = live.spec
        self._vocabulary = vocabulary
        self._with_logprobs = live.spec.sampling.logprobs is not None

    def started(self) -> pb.Started:
        """The first event."""
        started = self._live.log.started
        self._live.log.start_told = True
        return pb.Started(
            request_id=self._spec.request_id,
            prompt_tokens=len(self._live.prompt),
            cached_tokens=started.cached_tokens if started else 0,
            seed=self._spec.sampling.seed,
            model_fingerprint=self._live.model,
        )

    def delta(self, log: SequenceLog) -> pb.Delta | None:
        """What has come since the last delta of this sequence; None where nothing of it can be shown yet."""
        count = log.received - log.taken
        text = "".join(log.text)
        # Tokens without text wait for the next delta to count them; the last one counts what is left.
        if not text and not (count and (log.end is not None or self._spec.token_ids or log.logprobs)):
            return None
        delta = pb.Delta(
            index=log.index,
            text=text,
            token_ids=log.untaken if self._spec.token_ids else (),
            logprobs=self._logprobs(log) if log.logprobs else (),
            token_offset=log.taken,
            token_count=count,
        )
        self._live.log.take(log)
        return delta

    def held(self, log: SequenceLog, end: End) -> pb.Delta:
        """The text that belongs to the end; after the last delta."""
        return pb.Delta(index=log.index, text=end.held, token_offset=log.received)

    def finished(self, log: SequenceLog, end: End) -> pb.Finished:
        """The end of a sequence."""
        finished = pb.Finished(
            index=log.index,
            finish_reason=_reason(end),
            completion_tokens=log.received,
            cumulative_logprob=log.cumulative if self._with_logprobs else None,
        )
        _set_matched_stop(finished, end)
        return finished

    def done(self) -> pb.Done:
        """The last event."""
        return pb.Done(usage=self._usage(), timings=self._timings())

    def response(self, prompt_text: str) -> pb.GenerateResponse:
        """The unary answer; every sequence has its end."""
        response = pb.GenerateResponse(
            request_id=self._spec.request_id,
            outputs=[self._output(log, log.end, prompt_text) for log in self._live.log.sequences if log.end],
            usage=self._usage(),
            timings=self._timings(),
        )
        for log in self._live.log.sequences:
            self._live.log.take(log)
        return response

    def _output(self, log: SequenceLog, end: End, prompt_text: str) -> pb.Output:
        output = pb.Output(
            index=log.index,
            text=(prompt_text if self._spec.echoes(log.index) else "") + "".join(log.text) + end.held,
            token_ids=log.untaken if self._spec.token_ids else (),
            logprobs=self._logprobs(log),
            finish_reason=_reason(end),
            seed=derive_seed(self._spec.sampling.seed, log.index),
            cumulative_logprob=log.cumulative if self._with_logprobs else None,
        )
        _set_matched_stop(output, end)
        return output

    def _logprobs(self, log: SequenceLog) -> list[pb.TokenLogprob]:
        return [self._logprob(token, found) for token, found in zip(log.untaken, log.logprobs, strict=False)]

    def _logprob(self, token: int, found: TokenLogprob) -> pb.TokenLogprob:
        return pb.TokenLogprob(
            token_id=token,
            token=self._vocabulary.bytes_of(token),
            logprob=found.logprob,
            rank=found.rank,
            top=self._top(found.top),
        )

    def _top(self, top: Sequence[tuple[int, float]]) -> list[pb.TokenLogprob]:
        return [
            pb.TokenLogprob(token_id=token, token=self._vocabulary.bytes_of(token), logprob=logprob, rank=rank)
            for rank, (token, logprob) in enumerate(top, 1)
        ]

    def _usage(self) -> pb.Usage:
        started = self._live.log.started
        return pb.Usage(
            prompt_tokens=len(self._live.prompt),
            completion_tokens=sum(log.received for log in self._live.log.sequences),
            cached_tokens=started.cached_tokens if started else 0,
        )

    def _timings(self) -> pb.Timings | None:
        if not self._spec.timings:
            return None
        live = self._live
        times = [log.end.times for log in live.log.sequences if log.end] or [NO_TIMES]
        queue = (live.submitted or live.arrived) - live.arrived + min(found.queue for found in times)
        context = min(found.context for found in times)
        first = live.first_token
        return pb.Timings(
            queue=duration(queue),
            prefill=duration(context),
            decode=duration(max(found.generation for found in times)),
            time_to_first_token=duration(queue + context if first is None else first),
        )


def _reason(end: End) -> pb.FinishReason.ValueType:
    """The ring's numbers are the API's; ERROR never gets here."""
    return cast(pb.FinishReason.ValueType, int(end.reason))


def _set_matched_stop(message: pb.Finished | pb.Output, end: End) -> None:
    if end.reason is FinishReason.STOP_STRING and end.stop_string is not None:
        message.stop_string = end.stop_string
    elif end.reason is FinishReason.STOP_TOKEN and end.stop_token is not None:
        message.stop_token_id = end.stop_token
