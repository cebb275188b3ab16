"""A server with OpenAI's HTTP API as the target, such as vLLM, SGLang or llama.cpp."""

import asyncio
import json
import ssl
from collections.abc import Mapping
from typing import Any, Self

import httpx2

from sluice.loadgen.target import Outcome, RequestOptions, TargetError
from sluice.loadgen.workload import Request

DONE = "[DONE]"
"""Data of the last event of a stream."""
CONNECT_SECONDS = 10.0
ERROR_CHARACTERS = 300
"""Characters of a server's error that are shown."""


class OpenAITarget:
    """Streams from /v1/completions or, with the option `chat`, from /v1/chat/completions."""

    def __init__(self, client: httpx2.AsyncClient, model: str, options: RequestOptions) -> None:
        self.model = model
        self._client, self._options = client, options

    @classmethod
    async def open(
        cls, address: str, options: RequestOptions, token: str | None = None, tls: ssl.SSLContext | bool = True
    ) -> Self:
        """Raises TargetError."""
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        client = httpx2.AsyncClient(
            base_url=base_url(address),
            headers=headers,
            verify=tls,
            timeout=httpx2.Timeout(options.timeout, connect=CONNECT_SECONDS),
            # No limits: the load determines the number of connections.
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None),
        )
        try:
            return cls(client, options.model or await _first_model(client), options)
        except BaseException:
            await client.aclose()
            raise

    async def send(self, request: Request, outcome: Outcome) -> None:
        path = "chat/completions" if self._options.chat else "completions"
        try:
            async with self._client.stream("POST", path, json=self._body(request)) as response:
                if response.is_success:
                    await self._read(response, outcome)
                else:
                    outcome.error = f"HTTP {response.status_code}: {_shortened(await response.aread())}"
        except (httpx2.HTTPError, ValueError) as error:
            outcome.error = f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        await self._client.aclose()

    async def _read(self, response: httpx2.Response, outcome: Outcome) -> None:
        """Raises ValueError if an event is not a JSON object, and if the stream ends early."""
        now, ended = asyncio.get_running_loop().time, False
        async for event in httpx2.EventSource(response):
            if event.data == DONE:
                return
            message = json.loads(event.data)
            if not isinstance(message, dict):
                raise ValueError(f"an event is {type(message).__name__}, not an object")
            if "error" in message:
                outcome.error = f"in the stream: {_shortened(event.data.encode())}"
                return
            choices = message.get("choices") or ()
            ended = ended or any(choice.get("finish_reason") for choice in choices)
            if text := "".join(map(self._text, choices)):
                outcome.on_chunk(now(), text)
            if usage := message.get("usage"):
                outcome.prompt_tokens = usage.get("prompt_tokens", 0)
                outcome.completion_tokens = usage.get("completion_tokens")
        # Some servers end a stream after the finish reason, without DONE.
        if not ended:
            raise ValueError(f"the stream ended without {DONE}")

    def _text(self, choice: Mapping[str, Any]) -> str:
        if not self._options.chat:
            return choice.get("text") or ""
        delta = choice.get("delta") or {}
        return "".join(delta.get(name) or "" for name in ("reasoning_content", "content"))

    def _body(self, request: Request) -> dict[str, Any]:
        messages = [{"role": "user", "content": request.prompt}]
        prompt = {"messages": messages} if self._options.chat else {"prompt": request.prompt}
        stream = {"stream": True, "stream_options": {"include_usage": True}}
        ignore_eos = {"ignore_eos": True} if self._options.ignore_eos else {}
        fields = {"max_tokens": request.max_tokens, "temperature": self._options.temperature, **ignore_eos}
        return {"model": self.model, **prompt, **fields, **stream}


def base_url(address: str) -> str:
    """The API's base URL for `host:port`, `http://host:port` or `http://host:port/v1`."""
    url = address if "://" in address else f"http://{address}"
    url = url.rstrip("/")
    return f"{url}/" if url.endswith("/v1") else f"{url}/v1/"


async def _first_model(client: httpx2.AsyncClient) -> str:
    try:
        response = await client.get("models")
        response.raise_for_status()
        return str(response.json()["data"][0]["id"])
    except httpx2.TransportError as error:
        raise TargetError(f"no server answers at {client.base_url} ({str(error) or type(error).__name__})") from error
    except (httpx2.HTTPError, ValueError, LookupError, TypeError) as error:
        cause = str(error) or type(error).__name__
        raise TargetError(f"{client.base_url}models does not name a model ({cause}); give one with --model") from error


def _shortened(body: bytes) -> str:
    return " ".join(body.decode(errors="replace").split())[:ERROR_CHARACTERS]
