"""`Client`: the blocking client."""

from collections.abc import Mapping, Sequence
from typing import Any, Self, Unpack

import grpc
from grpc_health.v1 import health_pb2

from sluice.client import adapters, admin, requests
from sluice.client.adapters import LORAS, PROMPT_ADAPTERS, Folder, RouterLoras, RouterPromptAdapters
from sluice.client.admin import CacheEvents, RankAnswer, ServingVersion, Steps
from sluice.client.calls import Calls
from sluice.client.connection import DEFAULT_ADDRESS, ClientOptions, Metadata, Routers
from sluice.client.errors import ModelNotFound
from sluice.client.options import Message, Options, Prompt, TokenizeOptions
from sluice.client.results import Generation, Tokenization, is_serving, read_generation, read_tokenization
from sluice.client.streams import Stream
from sluice.v1 import admin_pb2
from sluice.v1 import generation_pb2 as pb


class Client:
    """A blocking client of one or more interchangeable routers. Thread-safe.

    ::

        with Client("127.0.0.1:50051") as client:
            print(client.generate("Hello", max_tokens=16).text)
            for chunk in client.stream("Hello", max_tokens=16):
                print(chunk.text, end="")

    After a router fails, calls go to the next one, and streams resume there. Calls raise `SluiceError`.
    """

    def __init__(self, addresses: str | Sequence[str] = DEFAULT_ADDRESS, **options: Unpack[ClientOptions]) -> None:
        """`addresses`: HOST:PORT of each router. Connects with the first call.

        Raises TypeError for an unknown option, ValueError for an invalid address or option, OSError for an unreadable
        certificate file.
        """
        self._routers = Routers(grpc, addresses, **options)
        self._calls = Calls(self._routers)

    @property
    def addresses(self) -> tuple[str, ...]:
        return self._routers.addresses

    def generate(
        self, prompt: Prompt, *, timeout: float | None = None, metadata: Metadata = (), **options: Unpack[Options]
    ) -> Generation:
        """Generate, and return the complete result.

        `options` are the fields of `sluice.client.Options`. `timeout` is in seconds (None: the client's default);
        `metadata` replaces the client's entries of the same name in this call. Raises SluiceError if the call fails,
        TypeError for an unknown option.
        """
        request = pb.GenerateRequest(spec=requests.build_spec(prompt, options))
        return read_generation(self._calls.call(lambda router: router.generation.Generate, request, timeout, metadata))

    def stream(
        self, prompt: Prompt, *, timeout: float | None = None, metadata: Metadata = (), **options: Unpack[Options]
    ) -> Stream:
        """Start generating, and return an iterator of `Chunk`, which raises SluiceError if the stream fails.

        `options`, `timeout` and `metadata` are as in `generate`. Raises TypeError for an unknown option.
        """
        return Stream(requests.build_spec(prompt, options), self._routers, timeout, metadata)

    def abort(self, request_id: str, reason: str = "") -> bool:
        """Stop a request, also one that another client sent. Returns False if it runs at none of the routers."""
        request = pb.AbortRequest(request_id=request_id, reason=reason)
        return self._calls.any(lambda router: router.generation.Abort, request, lambda response: response.aborted)

    def tokenize(
        self, text: str | Sequence[Message], *, metadata: Metadata = (), **options: Unpack[TokenizeOptions]
    ) -> Tokenization:
        """Return the token ids of a text or a chat, as the server would tokenize it as a prompt.

        `options` are the fields of `sluice.client.TokenizeOptions`. Raises SluiceError, TypeError for an unknown
        option.
        """
        request = requests.tokenize_request(text, options)
        return read_tokenization(
            self._calls.call(lambda router: router.generation.Tokenize, request, metadata=metadata)
        )

    def detokenize(
        self,
        token_ids: Sequence[int],
        *,
        model: str = "",
        skip_special_tokens: bool | None = None,
        metadata: Metadata = (),
    ) -> str:
        """Return the text of token ids. Raises SluiceError."""
        request = requests.detokenize_request(token_ids, model, skip_special_tokens)
        return str(self._calls.call(lambda router: router.generation.Detokenize, request, metadata=metadata).text)

    def models(self, *, metadata: Metadata = ()) -> list[admin_pb2.Model]:
        """Return the served models. Raises SluiceError."""
        found: list[admin_pb2.Model] = []
        request = admin_pb2.ListModelsRequest()
        while True:
            answer = self._calls.call(lambda router: router.models.ListModels, request, metadata=metadata)
            found += answer.models
            if not answer.next_page_token:
                return found
            request.page_token = answer.next_page_token

    def stats(self) -> admin_pb2.Stats:
        """Return statistics of the engines and detokenizers. Raises SluiceError."""
        response = self._calls.call(lambda router: router.admin.GetStats, admin_pb2.GetStatsRequest())
        stats: admin_pb2.Stats = response.stats
        return stats

    def server_info(self) -> admin_pb2.GetServerInfoResponse:
        """Describe the router that answers, and the engines, detokenizers and models that it knows."""
        request = admin_pb2.GetServerInfoRequest()
        info: admin_pb2.GetServerInfoResponse = self._calls.call(lambda router: router.admin.GetServerInfo, request)
        return info

    def stream_steps(self, *, timeout: float | None = None) -> Steps:
        """Return an iterator over the statistics of each engine step and request, as they are reported.

        The client's default timeout does not apply.
        """
        return Steps(self._routers, lambda router: router.admin.StreamSteps, admin_pb2.StreamStepsRequest(), timeout)

    def stream_cache_events(self, engine_id: str = "", *, timeout: float | None = None) -> CacheEvents:
        """Return an iterator over the KV cache events of one engine, or of all ("").

        Starts with the oldest events in the buffer of each engine, see docs/kv_cache.md. The client's default timeout
        does not apply.
        """
        request = admin_pb2.StreamCacheEventsRequest(engine_id=engine_id)
        return CacheEvents(self._routers, lambda router: router.admin.StreamCacheEvents, request, timeout)

    def call_engines(
        self,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        ranks: Sequence[int] | None = None,
        *,
        timeout: float | None = None,
    ) -> list[RankAnswer]:
        """Run a method, by name, on every rank of every engine, and return the answers by engine id, then rank.

        See docs/executor.md. `ranks` restricts the call to these ranks of each engine. A rank that failed has an
        `error` in its answer. `timeout`, in seconds, limits the time for engines to answer (default 30 s). Never
        retried, since the method may have run. Raises SluiceError; TypeError or ValueError for arguments that JSON
        cannot represent.
        """
        request = admin.call_request(method, args, kwargs, ranks, timeout)
        return admin.read_answers(
            self._calls.call_once(lambda router: router.admin.CallEngines, request, admin.deadline(timeout))
        )

    def serving_versions(self, *, timeout: float | None = None) -> list[ServingVersion]:
        """Return the model version that each router sends new requests to, in the order of `addresses`.

        A router that did not answer has an `error`. If AdminService has a separate port, connect to that port.
        """
        request = admin_pb2.GetServerInfoRequest()
        answers = self._calls.call_each(lambda router: router.admin.GetServerInfo, request, timeout)
        return admin.read_info(self.addresses, answers)

    def set_serving_version(self, version: str, *, timeout: float | None = None) -> list[ServingVersion]:
        """Make every router send new requests to engines with this label (`model_version`); "": to any engine.

        Streams that have begun stay with their model. The answers are in the order of `addresses`; a router that
        failed has an `error`, and the others change all the same. Not retried. A router that restarts uses its setting
        `serving_version` again.
        """
        request = admin_pb2.SetServingVersionRequest(version=version)
        answers = self._calls.call_each(lambda router: router.admin.SetServingVersion, request, timeout)
        return admin.read_set(self.addresses, answers)

    def load_lora(
        self,
        lora_id: str,
        *,
        path: str | None = None,
        folder: Folder | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> list[RouterLoras]:
        """Load a LoRA adapter on all engines, through every router, for requests with this `lora_id`.

        Give either `path`, a folder on the engines' machines, or `folder`, a local folder as peft saves it, whose files
        are uploaded. Loading an id again replaces its weights for later requests. The answers are in the order of
        `addresses`; a router that failed has an `error`, which is raised if all failed. Not retried. Raises
        SluiceError; OSError or ValueError for unusable files; TypeError unless exactly one of `path` and `folder` is
        given.
        """
        adapters.check_lora_source(path, folder)
        if folder is None:
            request = admin_pb2.LoadLoraRequest(lora_id=lora_id, path=path or "", model=model)
            answers = self._calls.call_each(lambda router: router.models.LoadLora, request, timeout)
        else:
            files = adapters.AdapterFolder(folder)
            uploads = [adapters.Upload(lora_id, files, model) for _ in self.addresses]
            calls = zip(self._routers.all, map(iter, uploads), strict=True)
            answers = self._calls.call_all(lambda router: router.models.UploadLora, calls, timeout)
            adapters.raise_read_error(uploads)
        return LORAS.loaded(self.addresses, answers)

    def unload_lora(self, lora_id: str, *, timeout: float | None = None) -> list[RouterLoras]:
        """Unload a LoRA adapter at every router. Requests that have begun continue with it.

        Answers and errors are like those of `load_lora`. Raises AdapterNotFound if the id is loaded at no router.
        """
        return self._calls.unload_adapter(LORAS, lora_id, timeout)

    def list_loras(self, *, timeout: float | None = None, metadata: Metadata = ()) -> list[RouterLoras]:
        """Return the LoRA adapters that each router lists, by id. Routers agree within seconds of a change.

        Answers and errors are like those of `load_lora`.
        """
        return self._calls.list_adapters(LORAS, timeout, metadata)

    def load_prompt_adapter(
        self,
        prompt_adapter_id: str,
        *,
        rows: Any = None,
        folder: Folder | None = None,
        path: str | None = None,
        model: str = "",
        timeout: float | None = None,
    ) -> list[RouterPromptAdapters]:
        """Load a prompt adapter, the embeddings of prompt tuning, at every router for requests with its id.

        Give one of `rows`, embeddings as in the option `prompt_table`; `folder`, a local folder as peft saves it, whose
        files are uploaded; and `path`, a folder on the routers' machines. Loading an id again replaces its embeddings
        for later requests. The answers are in the order of `addresses`; a router that failed has an `error`, which is
        raised if all failed. Not retried. Raises SluiceError; OSError or ValueError for unusable files; TypeError
        unless exactly one of the three is given.
        """
        request = adapters.prompt_adapter_request(prompt_adapter_id, path, folder, rows, model)
        answers = self._calls.call_each(lambda router: router.models.LoadPromptAdapter, request, timeout)
        return PROMPT_ADAPTERS.loaded(self.addresses, answers)

    def unload_prompt_adapter(
        self, prompt_adapter_id: str, *, timeout: float | None = None
    ) -> list[RouterPromptAdapters]:
        """Unload a prompt adapter at every router. Requests that have begun continue with it.

        Answers and errors are like those of `load_prompt_adapter`. Raises AdapterNotFound if the id is loaded at no
        router.
        """
        return self._calls.unload_adapter(PROMPT_ADAPTERS, prompt_adapter_id, timeout)

    def list_prompt_adapters(self, *, timeout: float | None = None) -> list[RouterPromptAdapters]:
        """Return the prompt adapters that each router lists, by id. Routers agree within seconds of a change.

        Answers and errors are like those of `load_prompt_adapter`.
        """
        return self._calls.list_adapters(PROMPT_ADAPTERS, timeout)

    def health(self, service: str = "", *, timeout: float | None = None) -> bool:
        """Return whether any router serves requests, or this gRPC service, such as "sluice.v1.GenerationService".

        Raises SluiceError if no router answers.
        """
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            return self._calls.any(lambda router: router.health.Check, request, is_serving, timeout)
        except ModelNotFound:
            return False

    def close(self) -> None:
        """Close the connections, which cancels the running calls."""
        self._routers.close()
        for router in self._routers.all:
            router.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
