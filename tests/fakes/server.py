"""A gRPC server with scripted answers, for tests of the clients and the command line."""
# ruff: noqa: N802

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sluice.v1 import admin_pb2, admin_pb2_grpc, generation_pb2, generation_pb2_grpc
from tests.fakes.server_adapters import AdapterCalls
from tests.fakes.server_script import Script


class FakeServer(
    AdapterCalls,
    generation_pb2_grpc.GenerationServiceServicer,
    admin_pb2_grpc.ModelServiceServicer,
    admin_pb2_grpc.AdminServiceServicer,
    health_pb2_grpc.HealthServicer,
):
    """All services of a router, answered from one script."""

    def __init__(self, script: Script) -> None:
        self.script = script

    def Generate(self, request: Any, context: Any) -> Any:
        hangs = self.script.hangs
        self._record(request, context)
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
        self._record(request, context, fail=self.script.fail_after is None)
        self._check_lora(request.spec.lora_id, context)
        self._check_prompt_adapter(request.spec.prompt_adapter_id, context)
        self._watch_end(context)
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
        yield event(
            started=generation_pb2.Started(
                request_id="r1", prompt_tokens=3, cached_tokens=2, seed=7, prompt_tail=self.script.prompt_tail
            )
        )
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
        self._record(request, context)
        # The client may abort after the last delta, before the call has begun to hang.
        generations = (generation_pb2.GenerateRequest, generation_pb2.GenerateStreamRequest)
        will_hang = self.script.hangs and any(
            isinstance(seen, generations) and seen.spec.request_id == request.request_id for seen in self.script.seen
        )
        if will_hang or request.request_id in self.script.hanging:
            self.script.aborted.add(request.request_id)
        return generation_pb2.AbortResponse(aborted=request.request_id in ("r1", *self.script.aborted))

    def Tokenize(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        text = request.text + "".join(message.content for message in request.chat.messages)
        offsets = [generation_pb2.Offset(start=i, end=i + 1) for i in range(len(text))]
        return generation_pb2.TokenizeResponse(
            token_ids=[ord(letter) for letter in text], offsets=offsets if request.offsets else []
        )

    def Detokenize(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        return generation_pb2.DetokenizeResponse(text="".join(map(chr, request.token_ids)))

    def ListModels(self, request: Any, context: Any) -> Any:
        self._record(request, context, fail=self.script.fail_after is None)
        model = admin_pb2.Model(name="tiny", max_context_tokens=1024, capabilities=self.script.capabilities)
        model.default_sampling.CopyFrom(self.script.default_sampling)
        return admin_pb2.ListModelsResponse(models=[model])

    def GetStats(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        if self.script.no_stats is not None:
            self.script.no_stats.abort(context)
        return admin_pb2.GetStatsResponse(stats=self.script.stats)

    def CallEngines(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        return admin_pb2.CallEnginesResponse(answers=self.script.rank_answers)

    def GetServerInfo(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        return self.script.info

    def SetServingVersion(self, request: Any, context: Any) -> Any:
        self._record(request, context)
        info, former = self.script.info, self.script.info.serving_version
        info.serving_version = request.version
        return admin_pb2.SetServingVersionResponse(
            former_version=former, version=request.version, serving_engines=info.serving_engines
        )

    def StreamSteps(self, request: Any, context: Any) -> Iterator[Any]:
        self._record(request, context)
        if self.script.no_stats is not None:
            self.script.no_stats.abort(context)
        self._watch_end(context)
        context.send_initial_metadata(())
        yield from self.script.steps
        self._wait_for_the_end(context)

    def StreamCacheEvents(self, request: Any, context: Any) -> Iterator[Any]:
        self._record(request, context)
        self._watch_end(context)
        context.send_initial_metadata(())
        yield from self.script.cache_events
        self._wait_for_the_end(context)

    def Check(self, request: Any, context: Any) -> Any:
        if request.service not in self.script.health:
            context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return health_pb2.HealthCheckResponse(status=self.script.health[request.service])

    def _watch_end(self, context: Any) -> None:
        # False: the call has already ended.
        if not context.add_callback(self.script.gone.set):
            self.script.gone.set()

    def _record(self, request: Any, context: Any, fail: bool = True) -> None:
        self.script.seen.append(request)
        self.script.metadata.append(dict(context.invocation_metadata()))
        if fail and self.script.failure is not None:
            self.script.failure.abort(context)


# Calls that no test needs answer UNIMPLEMENTED, as the generated base classes do.
FakeServer.__abstractmethods__ = frozenset()


@contextmanager
def serve(script: Script, port: int = 0) -> Iterator[str]:
    """Yields the address of a running server."""
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
