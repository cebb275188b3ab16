"""A Sluice ring as the target, through the Python client."""

import asyncio
from collections.abc import Sequence
from typing import Self

from sluice.client import AsyncClient, ClientOptions, Options, Prompt, SluiceError
from sluice.loadgen.target import Outcome, RequestOptions
from sluice.loadgen.workload import Request


class GrpcTarget:
    """Streams completions of prompts, or answers to user messages."""

    def __init__(self, client: AsyncClient, model: str, options: RequestOptions) -> None:
        self.model = model
        self._client, self._chat = client, options.chat
        self._options = Options(model=model, temperature=options.temperature, ignore_eos=options.ignore_eos or None)

    @classmethod
    async def open(cls, addresses: Sequence[str], options: RequestOptions, connection: ClientOptions) -> Self:
        """Raises SluiceError."""
        client = AsyncClient(addresses, **connection)
        try:
            served = [model.name for model in await client.models()]
        except BaseException:
            await client.close()
            raise
        return cls(client, options.model or next(iter(served), ""), options)

    async def send(self, request: Request, outcome: Outcome) -> None:
        now = asyncio.get_running_loop().time
        prompt: Prompt = [{"role": "user", "content": request.prompt}] if self._chat else request.prompt
        options = self._options | Options(max_tokens=request.max_tokens)
        try:
            async with self._client.stream(prompt, **options) as stream:
                async for chunk in stream:
                    if chunk.token_count:
                        outcome.on_chunk(now(), chunk.text, chunk.token_count)
        except SluiceError as error:
            outcome.error = f"{type(error).__name__}: {error.message}"
            return
        if stream.usage is not None:
            outcome.prompt_tokens = stream.usage.prompt_tokens
            outcome.completion_tokens = stream.usage.completion_tokens

    async def close(self) -> None:
        await self._client.close()
