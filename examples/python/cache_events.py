"""Prints events of the engines' prefix caches until all blocks of a prompt are stored: `cache_events.py [PROMPT]`.

Requires the setting kv_event_buffer of engines: `sluice serve --set engine.kv_event_buffer=10000`.
"""

import sys
from secrets import token_hex

from sluice import Client

prompt = sys.argv[1] if len(sys.argv) > 1 else "def fibonacci(n):\n    a, b = 0, 1\n" * 4

with Client("127.0.0.1:50051", timeout=60) as client:
    # With a new salt, no block of the prompt is cached yet.
    client.generate(prompt, max_tokens=1, kv_cache={"salt": token_hex()})
    token_ids = list(client.tokenize(prompt).token_ids)
    size = client.stats().engines[0].tokens_per_kv_block
    missing = {tuple(token_ids[start : start + size]) for start in range(0, len(token_ids) - size, size)}
    print(f"the prompt has {len(missing)} different blocks of {size} tokens")
    with client.stream_cache_events() as responses:
        for response in responses:
            for event in response.events:
                print(f"{response.engine_id} {event.event_id}: {event.WhichOneof('data')}", end=" ")
                if event.HasField("stored"):
                    stored = event.stored
                    missing.discard(tuple(stored.token_ids))
                    print(f"{stored.block_hash:016x} {client.detokenize(stored.token_ids)!r}")
                else:
                    print([f"{block:016x}" for block in event.removed.block_hashes] or "")
            if not missing:
                break
