"""sluice.v1.GenerationService."""

from collections.abc import Sequence

import structlog

from router.api.responses import ResponseBuilder
from router.api.rpc import Context
from router.api.stream_writer import StreamWriter, wait_for_end
from router.requests.pipeline import RequestPipeline
from router.requests.registry import RequestState
from router.text.tokenizer_pool import Encoding, Text
from router.validate.limits import Limits
from router.validate.model import Model
from router.validate.spec import check_model
from router.validate.violations import Violations, logged
from sluice.v1 import generation_pb2 as pb


class GenerationService:
    """Each method answers one call."""

    def __init__(
        self,
        front: RequestPipeline,
        text: Text,
        model: Model,
        limits: Limits,
        write_seconds: float,
        logger: structlog.stdlib.BoundLogger,
    ) -> None:
        """A single write to a client may take `write_seconds`."""
        self._front = front
        self._text = text
        self._model = model
        self._limits = limits
        self._write_seconds = write_seconds
        self._logger = logger

    async def generate(self, request: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        """All of it at once."""
        async with self._front.serve(request.spec, context.caller, context.peer, streaming=False) as live:
            await wait_for_end(live)
            return ResponseBuilder(live, self._text.vocabulary).response(await self._prompt_text(live))

    async def generate_stream(self, request: pb.GenerateStreamRequest, context: Context) -> None:
        """Event by event."""
        async with self._front.serve(request.spec, context.caller, context.peer, streaming=True) as live:
            prompt_text = await self._prompt_text(live)
            writer = ResponseBuilder(live, self._text.vocabulary)
            await StreamWriter(live, writer, context.write, self._write_seconds).run(prompt_text)

    async def abort(self, request: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """Its stream ends with ABORTED; its id is free at once. Other tenants' requests are not there."""
        bad = Violations()
        if not request.request_id:
            bad.add("request_id", "is empty")
        bad.raise_if_any()
        aborted = await self._front.abort(request.request_id, context.caller)
        reason = logged(request.reason)
        self._logger.info("abort", request_id=logged(request.request_id), aborted=aborted, reason=reason)
        return pb.AbortResponse(aborted=aborted)

    async def tokenize(self, request: pb.TokenizeRequest, _: Context) -> pb.TokenizeResponse:
        """As a text prompt would be."""
        check_model(request.model, self._model, "model")
        bad = Violations()
        bad.at_most("text", len(request.text.encode()), self._limits.prompt_bytes, "bytes")
        bad.raise_if_any()
        add_special_tokens = request.add_special_tokens if request.HasField("add_special_tokens") else True

        def answer(found: Encoding) -> pb.TokenizeResponse:
            offsets = [pb.Offset(start=start, end=end) for start, end in found.offsets] if request.offsets else ()
            return pb.TokenizeResponse(token_ids=found.ids, offsets=offsets)

        return await self._text.encode(request.text, add_special_tokens, answer)

    async def detokenize(self, request: pb.DetokenizeRequest, _: Context) -> pb.DetokenizeResponse:
        """As the joined text of a stream of these ids would be."""
        check_model(request.model, self._model, "model")
        bad = Violations()
        if bad.at_most("token_ids", len(request.token_ids), self._limits.prompt_ids, "ids"):
            bad.token_ids("token_ids", request.token_ids, self._model.vocab_size)
        bad.raise_if_any()
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await self._decode(request.token_ids, skip))

    async def _prompt_text(self, live: RequestState) -> str:
        return await self._decode(live.prompt, live.spec.text.skip_special_tokens) if live.spec.echo else ""

    async def _decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        return await self._text.decode(list(ids), skip_special_tokens)
