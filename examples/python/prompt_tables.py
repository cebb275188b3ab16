"""Embeddings before a prompt: `python prompt_tables.py [FOLDER]`, where FOLDER is a prompt adapter that peft saved.

Without a folder, the embeddings are random.
"""

import sys

import numpy as np

from sluice import Client

PROMPT = "def area(radius):"
OPTIONS = {"max_tokens": 16, "temperature": 0}

with Client("127.0.0.1:50051", timeout=60) as client:
    (model,) = client.models()
    rows = np.random.default_rng(0).normal(0, 0.05, (8, model.hidden_size)).astype(np.float32)
    print("model:", repr(client.generate(PROMPT, **OPTIONS).text))

    # Embeddings that one request brings.
    table = client.generate(PROMPT, prompt_table=rows, **OPTIONS)
    print("table:", repr(table.text), f"({table.usage.prompt_tokens} prompt tokens)")

    # A prompt adapter, which is loaded once and used by any number of requests.
    source = {"folder": sys.argv[1]} if len(sys.argv) > 1 else {"rows": rows}
    for router in client.load_prompt_adapter("mine", **source):
        print(f"{router.address}: {router.error or router.prompt_adapters[0]}")
    print("adapter:", repr(client.generate(PROMPT, prompt_adapter_id="mine", **OPTIONS).text))
    client.unload_prompt_adapter("mine")
