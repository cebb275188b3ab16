"""The same text with and without speculative decoding, and how many of its tokens came from drafts.

Engines can have a draft model: `sluice serve Qwen/Qwen3-8B --set engine.draft_model=Qwen/Qwen3-0.6B`. Without one,
draft tokens are those that followed an earlier occurrence of the latest tokens.
"""

from sluice import Client

PROMPT = "def add_one(x):\n    return x + 1\n\n\ndef add_two(x):\n    return x + 2\n\n\n"

with Client("127.0.0.1:50051", timeout=60) as client:
    options = {"max_tokens": 64, "temperature": 0.7, "seed": 1, "token_ids": True}
    plain = client.generate(PROMPT, speculation={"max_draft_tokens": 0}, **options)
    print(plain.text)

    drafted = client.generate(PROMPT, speculation={"max_draft_tokens": 4}, **options)
    # If the caller knows what to expect, such as the file before an edit, that is used before other drafts.
    expectation = {"draft_token_ids": plain.outputs[0].token_ids, "max_draft_tokens": 8}
    expected = client.generate(PROMPT, speculation=expectation, **options)
    for name, result in (("without", plain), ("drafted", drafted), ("expected", expected)):
        same = "the same text" if result.text == plain.text else "another text"
        usage = result.usage
        print(f"{name}: {same}, {usage.accepted_draft_tokens} of {usage.completion_tokens} tokens drafted")
