"""sluice.v1.GenerationService: generation, abort, tokenization."""

from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace

from structlog.stdlib import BoundLogger
from tokenizers import Encoding

from router.api.responses import ResponseBuilder, write_stream
from router.api.rpc import Context
from router.api.watchdog import Watchdog
from router.errors import Reason, RequestError, Violations, logged, sent
from router.parse.chat import ChatPrompt, parse_chat
from router.parse.model import Limits, ServedModel, check_model
from router.requests.pipeline import RequestPipeline
from router.requests.request_state import RequestState
from router.text.tokenizer_pool import TokenizerPool
from sluice.v1 import generation_pb2 as pb


@dataclass(frozen=True)
class GenerationService:
    _pipeline: RequestPipeline
    _text: TokenizerPool
    _model: ServedModel
    _limits: Limits
    _writes: Watchdog
    """Limits the time of each write to a client."""
    _log: BoundLogger

    async def generate(self, message: pb.GenerateRequest, context: Context) -> pb.GenerateResponse:
        async with self._serve(message.spec, context, streaming=False) as request:
            await request.log.wait_until(lambda: request.log.complete)
            return await ResponseBuilder(request, self._text.vocabulary).response(await self._prompt_text(request))

    async def generate_stream(self, message: pb.GenerateStreamRequest, context: Context) -> None:
        async with self._serve(message.spec, context, streaming=True) as request:
            prompt_text = await self._prompt_text(request)
            builder = ResponseBuilder(request, self._text.vocabulary)
            await sent(write_stream(request, builder, context.write_bytes, self._writes, prompt_text))

    async def abort(self, message: pb.AbortRequest, context: Context) -> pb.AbortResponse:
        """End a request with ABORTED. Its id is free immediately. Requests of other tenants are not found."""
        if not message.request_id:
            raise RequestError.at("request_id", "is empty", reason=Reason.MISSING)
        aborted = await self._pipeline.abort(message.request_id, context.caller)
        reason = logged(message.reason)
        self._log.info("abort_called", request_id=logged(message.request_id), aborted=aborted, reason=reason)
        return pb.AbortResponse(aborted=aborted)

    async def tokenize(self, message: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:
        """Tokenize a text or a chat as a prompt would be."""
        check_model(message.model, self._model, "model")
        tenant = context.caller.tenant
        if message.HasField("chat"):
            return pb.TokenizeResponse(token_ids=await self._text.tokens(self._chat(message), tenant, later=True))
        bad = Violations()
        bad.at_most("text", len(message.text.encode()), self._limits.prompt_bytes, "bytes")
        bad.raise_if_any()
        add_special_tokens = message.add_special_tokens if message.HasField("add_special_tokens") else True

        def answer(encoding: Encoding) -> pb.TokenizeResponse:
            offsets = [pb.Offset(start=start, end=end) for start, end in encoding.offsets] if message.offsets else ()
            return pb.TokenizeResponse(token_ids=encoding.ids, offsets=offsets)

        return await self._text.encode(message.text, add_special_tokens, message.offsets, answer, tenant)

    async def detokenize(self, message: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        """The same text as the concatenated deltas of a stream of these ids."""
        check_model(message.model, self._model, "model")
        bad = Violations()
        if bad.at_most("token_ids", len(message.token_ids), self._limits.prompt_ids, "ids"):
            bad.token_ids("token_ids", message.token_ids, self._model.vocab_size)
        bad.raise_if_any()
        skip = message.skip_special_tokens if message.HasField("skip_special_tokens") else True
        text = await self._text.decode(message.token_ids, skip, context.caller.tenant, later=True)
        return pb.DetokenizeResponse(text=text)

    def _chat(self, message: pb.TokenizeRequest) -> ChatPrompt:
        """Raises RequestError."""
        bad = Violations()
        spec = pb.GenerationSpec(chat=message.chat, add_special_tokens=message.add_special_tokens)
        prompt = parse_chat(spec, self._model, self._limits, bad)
        for name in ("text", "offsets"):
            if getattr(message, name):
                bad.add(name, "cannot be combined with chat", reason=Reason.CONFLICT)
        if any(part.HasField("image") for turn in message.chat.messages for part in turn.parts):
            bad.add("chat.messages", "has images, which Tokenize does not support", reason=Reason.NOT_SUPPORTED)
        if bad.found:
            raise RequestError.invalid(
                [violation._replace(field=violation.field.removeprefix("spec.")) for violation in bad.found]
            )
        return replace(prompt, field="chat")

    def _serve(
        self, spec: pb.GenerationSpec, context: Context, streaming: bool
    ) -> AbstractAsyncContextManager[RequestState]:
        return self._pipeline.serve(spec, context.caller, context.peer, streaming, context.traceparent)

    async def _prompt_text(self, request: RequestState) -> str:
        """The prompt's text if it is to be echoed, otherwise empty."""
        spec = request.spec
        if not spec.echo:
            return ""
        # Virtual tokens have no text.
        prompt = request.prompt if request.virtual is None else request.virtual.without(request.prompt)
        return await self._text.prompt_text(prompt, spec.text, request.tenant)
