"""Many concurrent streams over one connection, with retries while the server is overloaded."""

import asyncio

from sluice import AsyncClient
from sluice.client import Overloaded


async def complete(client: AsyncClient, prompt: str) -> str:
    while True:
        try:
            return "".join([chunk.text async for chunk in client.stream(prompt, max_tokens=24, temperature=0)])
        except Overloaded as error:
            await asyncio.sleep(error.retry_after or 1)


async def main() -> None:
    prompts = [f"def method_{i}(self" for i in range(32)]
    async with AsyncClient("127.0.0.1:50051", timeout=60) as client:
        for prompt, text in zip(
            prompts, await asyncio.gather(*(complete(client, each) for each in prompts)), strict=True
        ):
            print(f"{prompt}{text.splitlines()[0] if text else ''}")


if __name__ == "__main__":
    asyncio.run(main())
