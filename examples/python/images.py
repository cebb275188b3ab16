"""Questions about an image: `python images.py PHOTO [QUESTION]`, where PHOTO is a PNG, JPEG or WebP file.

Requires a vision-language model: `sluice serve Qwen/Qwen2.5-VL-3B-Instruct`.
"""

import sys
from pathlib import Path

from sluice import Client

photo = Path(sys.argv[1]).read_bytes()
questions = [*(sys.argv[2:] or ["What is this?"]), "Which colours does it have?"]

with Client("127.0.0.1:50051", timeout=60) as client:
    (model,) = client.models()
    print(f"an image takes up to {model.image_tokens} tokens")
    for question in questions:
        parts = [{"type": "image", "data": photo}, {"type": "text", "text": question}]
        with client.stream([{"role": "user", "content": parts}], max_tokens=32, temperature=0) as stream:
            print(question, repr("".join(chunk.text for chunk in stream)))
        # For the second question, the image is in the engine's prefix cache.
        print(f"{stream.usage.cached_tokens} of {stream.usage.prompt_tokens} prompt tokens were cached")
