"""Outputs with and without a LoRA adapter: `python lora.py FOLDER`, where FOLDER is an adapter that peft saved.

Requires the setting lora of engines: `sluice serve --set engine.lora=true`.
"""

import sys

from sluice import Client

PROMPT = "def fibonacci(n):"

with Client("127.0.0.1:50051", timeout=60) as client:
    for router in client.load_lora("mine", folder=sys.argv[1]):
        print(f"{router.address}: {router.error or router.loras[0]}")
    for lora_id in ("mine", None):
        stream = client.stream(PROMPT, lora_id=lora_id, max_tokens=16, temperature=0)
        print(f"{lora_id or 'model'}: {''.join(chunk.text for chunk in stream)!r}")
    client.unload_lora("mine")
