"""A gRPC server with scripted answers: what the clients and the command line are tested against."""
# ruff: noqa: N802

import hashlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc

DETAILS_KEY = "grpc-status-details-bin"


@dataclass
class Failure:
    """A status with google.rpc details."""

    code: grpc.StatusCode
    message: str = "it failed"
    details: tuple[Any, ...] = ()

    def abort(self, context: Any) -> None:
        """Raises."""
        status = status_pb2.Status(code=self.code.value[0], message=self.message)
        for detail in self.details:
            packed = AnyMessage()
            packed.Pack(detail)
            status.details.append(packed)
        context.set_trailing_metadata([(DETAILS_KEY, status.SerializeToString())])
        context.abort(self.code, self.message)


def bad_request(field_name: str, description: str) -> Failure:
    """INVALID_ARGUMENT with a field violation."""
    violation = error_details_pb2.BadRequest.FieldViolation(field=field_name, description=description)
    return Failure(
        grpc.StatusCode.INVALID_ARGUMENT,
        f"{field_name}: {description}",
        (
            error_details_pb2.BadRequest(field_violations=[violation]),
            error_details_pb2.ErrorInfo(reason="INVALID_ARGUMENT", domain="sluice"),
        ),
    )


def adapter_not_found(name: str, field: str = "lora_id") -> Failure:
    """As of routers."""
    info = error_details_pb2.ErrorInfo(reason="ADAPTER_NOT_FOUND", domain="sluice")
    return Failure(grpc.StatusCode.NOT_FOUND, f"{field} is {name!r}; no adapter is loaded under this id", (info,))


@dataclass
class Script:
    """What the fake answers, and what it saw."""

    texts: list[str] = field(default_factory=lambda: ["Hello", ", ", "world"])
    failure: Failure | None = None
    fail_after: int | None = None
    """Send this many deltas before the failure."""
    stop_string: str | None = None
    """With which streams end; None: they end by their length."""
    hangs: bool = False
    """After the deltas, calls that begin now wait until the client goes or aborts, or until this is False again."""
    hanging: list[str] = field(default_factory=list)
    """Ids of requests that hang, or did."""
    aborted: set[str] = field(default_factory=set)
    """Ids of those that were told to end."""
    lose_event: bool = False
    """Leave out the number of the second event."""
    omit_done: bool = False
    seen: list[Any] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    gone: threading.Event = field(default_factory=threading.Event)
    """A stream has ended, on either side."""
    health: dict[str, int] = field(default_factory=lambda: {"": health_pb2.HealthCheckResponse.SERVING})
    capabilities: list[str] = field(default_factory=lambda: ["chat"])
    """Of the model."""
    no_stats: Failure | None = None
    """Statistics are refused, and nothing else."""
    stats: admin_pb2.Stats = field(default_factory=admin_pb2.Stats)
    rank_answers: list[admin_pb2.RankAnswer] = field(default_factory=list)
    """Of CallEngines."""
    info: admin_pb2.GetServerInfoResponse = field(default_factory=admin_pb2.GetServerInfoResponse)
    """Of GetServerInfo; SetServingVersion changes its version."""
    loras: dict[str, admin_pb2.Lora] = field(default_factory=dict)
    """By id; LoadLora, UploadLora and UnloadLora change them."""
    max_loras: int = 1024
    checks_loras: bool = False
    """A request with another lora_id or prompt_adapter_id is refused."""
    uploads: dict[str, list[bytes]] = field(default_factory=dict)
    """By id: adapter_config.json, then the parts of the weights, of the latest upload."""
    keeps_uploads: bool = True
    prompt_adapters: dict[str, admin_pb2.PromptAdapter] = field(default_factory=dict)
    """By id; LoadPromptAdapter and UnloadPromptAdapter change them."""
    steps: list[admin_pb2.StreamStepsResponse] = field(default_factory=list)
    """Told one after the other; after that nothing more comes."""
    cache_events: list[admin_pb2.StreamCacheEventsResponse] = field(default_factory=list)
    """Likewise."""


class FakeServer(
    generation_pb2_grpc.GenerationServiceServicer,
    admin_pb2_grpc.ModelServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
    health_pb2_grpc.HealthServicer,
):
    """All services, by one script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def Generate(self, request: Any, context: Any) -> Any:
        hangs = self.script.hangs
        self._note(request, context)
        self._check_lora(request.spec.lora_id, context)
        self._check_prompt_adapter(request.spec.prompt_adapter_id, context)
        text = "".join(self.script.texts)
        output = generation_pb2.Output(
            text=text, finish_reason=generation_pb2.FINISH_REASON_STOP_STRING, stop_string="!", seed=7
        )
        if request.spec.output.token_ids:
            output.token_ids.extend(range(len(self.script.texts)))
        if hangs:
            self._hang(context, request.spec.request_id)
            output = generation_pb2.Output(text=text, finish_reason=generation_pb2.FINISH_REASON_ABORTED)
        usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=len(self.script.texts), cached_tokens=2)
        return generation_pb2.GenerateResponse(request_id="r1", outputs=[output], usage=usage)

    def GenerateStream(self, request: Any, context: Any) -> Iterator[Any]:
        hangs = self.script.hangs
        self._note(request, context, fail=self.script.fail_after is None)
        self._check_lora(request.spec.lora_id, context)
        self._check_prompt_adapter(request.spec.prompt_adapter_id, context)
        self._tell_end(context)
        number = 0
        for event in self._events(hangs, request.spec.n or 1):
            number += 2 if self.script.lose_event and number == 1 else 1
            event.sequence = number
            yield event
            if self.script.fail_after is not None and number > self.script.fail_after and self.script.failure:
                self.script.failure.abort(context)
        if hangs:
            self._hang(context, request.spec.request_id)
            reason = generation_pb2.FINISH_REASON_ABORTED
            finished, done = generation_pb2.Finished(finish_reason=reason), generation_pb2.Done()
            yield generation_pb2.GenerateStreamResponse(sequence=number + 1, finished=finished)
            yield generation_pb2.GenerateStreamResponse(sequence=number + 2, done=done)

    def _events(self, hangs: bool, outputs: int) -> Iterator[Any]:
        """The same text for each output, interleaved."""
        event = generation_pb2.GenerateStreamResponse
        yield event(started=generation_pb2.Started(request_id="r1", prompt_tokens=3, cached_tokens=2, seed=7))
        for offset, text in enumerate(self.script.texts):
            for index in range(outputs):
                delta = generation_pb2.Delta(
                    index=index, text=text, token_ids=[offset], token_offset=offset, token_count=1
                )
                yield event(delta=delta)
        if hangs:
            return
        count, stop = len(self.script.texts), self.script.stop_string
        reason = generation_pb2.FINISH_REASON_STOP_STRING if stop else generation_pb2.FINISH_REASON_LENGTH
        for index in range(outputs):
            finished = generation_pb2.Finished(
                index=index, finish_reason=reason, completion_tokens=count, stop_string=stop
            )
            yield event(finished=finished)
        if not self.script.omit_done:
            usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=count * outputs, cached_tokens=2)
            yield event(done=generation_pb2.Done(usage=usage))

    def _hang(self, context: Any, request_id: str) -> None:
        self.script.hanging.append(request_id)
        while context.is_active() and self.script.hangs and request_id not in self.script.aborted:
            time.sleep(0.005)

    def _wait_for_the_end(self, context: Any) -> None:
        while context.is_active():
            time.sleep(0.005)

    def Abort(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        # Its client may have all that it gets before it hangs.
        begun = (generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)
        hangs = self.script.hangs and any(
            isinstance(each, begun) and each.spec.request_id == request.request_id for each in self.script.seen
        )
        if hangs or request.request_id in self.script.hanging:
            self.script.aborted.add(request.request_id)
        return generation_pb2.AbortResponse(aborted=request.request_id in ("r1", *self.script.aborted))

    def Tokenize(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        text = request.text + "".join(message.content for message in request.chat.messages)
        offsets = [generation_pb2.Offset(start=i, end=i + 1) for i in range(len(text))]
        return generation_pb2.TokenizeResponse(
            token_ids=[ord(letter) for letter in text], offsets=offsets if request.offsets else []
        )

    def Detokenize(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def ListModels(self, request: Any, context: Any) -> Any:
        self._note(request, context, fail=self.script.fail_after is None)
        model = admin_pb2.Model(name="tiny", max_context_tokens=1024, capabilities=self.script.capabilities)
        return admin_pb2.ListModelsResponse(models=[model])

    def LoadLora(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        lora = self._add_lora(admin_pb2.Lora(lora_id=request.lora_id, path=request.path, rank=8, version="1"), context)
        return admin_pb2.LoadLoraResponse(lora=lora)

    def UploadLora(self, requests: Iterator[Any], context: Any) -> Any:
        header = next(requests).header
        self._note(header, context)
        digest, parts = hashlib.sha256(header.config_json), self.script.uploads.setdefault(header.lora_id, [])
        parts[:] = [header.config_json]
        size = 0
        for request in requests:
            size += len(request.data)
            digest.update(request.data)
            if self.script.keeps_uploads:
                parts.append(request.data)
        # A call that its client cancels may end here like a complete one.
        if not size:
            Failure(grpc.StatusCode.INVALID_ARGUMENT, "no weights").abort(context)
        lora = self._add_lora(admin_pb2.Lora(lora_id=header.lora_id, rank=8, version=digest.hexdigest()), context)
        return admin_pb2.UploadLoraResponse(lora=lora)

    def _add_lora(self, lora: Any, context: Any) -> Any:
        loras = self.script.loras
        if lora.lora_id not in loras and len(loras) >= self.script.max_loras:
            Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many adapters").abort(context)
        loras[lora.lora_id] = lora
        return lora

    def _check_lora(self, lora_id: str, context: Any) -> None:
        if lora_id and self.script.checks_loras and lora_id not in self.script.loras:
            adapter_not_found(lora_id).abort(context)

    def _check_prompt_adapter(self, name: str, context: Any) -> None:
        if name and self.script.checks_loras and name not in self.script.prompt_adapters:
            adapter_not_found(name, "prompt_adapter_id").abort(context)

    def UnloadLora(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        if self.script.loras.pop(request.lora_id, None) is None:
            adapter_not_found(request.lora_id).abort(context)
        return admin_pb2.UnloadLoraResponse()

    def ListLoras(self, request: Any, context: Any) -> Any:
        """Two in a page."""
        self._note(request, context)
        found = [lora for lora_id, lora in sorted(self.script.loras.items()) if lora_id > request.page_token]
        token = found[1].lora_id if len(found) > 2 else ""
        return admin_pb2.ListLorasResponse(loras=found[:2], next_page_token=token)

    def LoadPromptAdapter(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        name = request.prompt_adapter_id
        if name not in self.script.prompt_adapters and len(self.script.prompt_adapters) >= self.script.max_loras:
            Failure(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many prompt adapters").abort(context)
        found = admin_pb2.PromptAdapter(prompt_adapter_id=name, path=request.path, rows=8, version="1")
        self.script.prompt_adapters[name] = found
        return admin_pb2.LoadPromptAdapterResponse(prompt_adapter=found)

    def UnloadPromptAdapter(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        if self.script.prompt_adapters.pop(request.prompt_adapter_id, None) is None:
            adapter_not_found(request.prompt_adapter_id, "prompt_adapter_id").abort(context)
        return admin_pb2.UnloadPromptAdapterResponse()

    def ListPromptAdapters(self, request: Any, context: Any) -> Any:
        """Two in a page."""
        self._note(request, context)
        every = sorted(self.script.prompt_adapters.items())
        found = [adapter for name, adapter in every if name > request.page_token]
        token = found[1].prompt_adapter_id if len(found) > 2 else ""
        return admin_pb2.ListPromptAdaptersResponse(prompt_adapters=found[:2], next_page_token=token)

    def GetStats(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        if self.script.no_stats is not None:
            self.script.no_stats.abort(context)
        return admin_pb2.GetStatsResponse(stats=self.script.stats)

    def CallEngines(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        return admin_pb2.CallEnginesResponse(answers=self.script.rank_answers)

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        return self.script.info

    def SetServingVersion(self, request: Any, context: Any) -> Any:
        self._note(request, context)
        info, former = self.script.info, self.script.info.serving_version
        info.serving_version = request.version
        return admin_pb2.SetServingVersionResponse(
            former_version=former, version=request.version, serving_engines=info.serving_engines
        )

    def StreamSteps(self, request: Any, context: Any) -> Iterator[Any]:
        self._note(request, context)
        if self.script.no_stats is not None:
            self.script.no_stats.abort(context)
        self._tell_end(context)
        context.send_initial_metadata(())
        yield from self.script.steps
        self._wait_for_the_end(context)

    def StreamCacheEvents(self, request: Any, context: Any) -> Iterator[Any]:
        self._note(request, context)
        self._tell_end(context)
        context.send_initial_metadata(())
        yield from self.script.cache_events
        self._wait_for_the_end(context)

    def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self.script.health:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self.script.health[request.service])

    def _tell_end(self, context: Any) -> None:
        # Refused if it has ended already.
        if not context.add_callback(self.script.gone.set):
            self.script.gone.set()

    def _note(self, request: Any, context: Any, fail: bool = True) -> None:
        self.script.seen.append(request)
        self.script.metadata.append(dict(context.invocation_metadata()))
        if fail and self.script.failure is not None:
            self.script.failure.abort(context)


# Calls that no test needs answer UNIMPLEMENTED, as the generated base classes do.
FakeServer.__abstractmethods__ = frozenset()


@contextmanager
def serve(script: Script, port: int = 0) -> Iterator[str]:
    """A running fake; gives its address."""
    servicer: Any = FakeServer(script)
    server = grpc.server(ThreadPoolExecutor(8))
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
    admin_pb2_grpc.add_ModelServiceServicer_to_server(servicer, server)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()
