"""Streams a completion: python stream.py [PROMPT]."""

import sys

from sluice import Client

prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):"

with Client("127.0.0.1:50051") as client, client.stream(prompt, max_tokens=64, temperature=0) as stream:
    for chunk in stream:
        print(chunk.text, end="", flush=True)
print(f"\n{stream.usage}", file=sys.stderr)
