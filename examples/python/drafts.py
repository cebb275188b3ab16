"""The same text with and without drafts, and how many of its tokens were drafted.

Engines may have a draft model: `sluice serve Qwen/Qwen3-8B --set engine.draft_model=Qwen/Qwen3-0.6B`. Those without one
draft what followed the last tokens before.
"""

from sluice import Client

PROMPT = "def add_one(x):\n    return x + 1\n\n\ndef add_two(x):\n    return x + 2\n\n\n"

with Client("127.0.0.1:50051", timeout=60) as client:
    options = {"max_tokens": 64, "temperature": 0.7, "seed": 1, "token_ids": True}
    plain = client.generate(PROMPT, speculation={"max_draft_tokens": 0}, **options)
    print(plain.text)

    drafted = client.generate(PROMPT, speculation={"max_draft_tokens": 4}, **options)
    # What the caller expects the output to be, such as the file before an edit, comes before other guesses.
    expected = {"draft_token_ids": plain.outputs[0].token_ids, "max_draft_tokens": 8}
    given = client.generate(PROMPT, speculation=expected, **options)
    for name, found in (("without", plain), ("drafted", drafted), ("expected", given)):
        same = "the same text" if found.text == plain.text else "another text"
        print(f"{name}: {same}, {found.usage.accepted_draft_tokens} of {found.usage.completion_tokens} tokens drafted")
