"""JSON that a schema validates, one of several choices, and speculative decoding."""

import json

from sluice import Client

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}

with Client("127.0.0.1:50051", timeout=60) as client:
    person = client.generate("A person as JSON: ", guided={"json_schema": SCHEMA}, seed=1, max_tokens=128)
    print(json.loads(person.text))

    answer = client.generate("Is a whale a fish? ", guided={"choice": ["yes", "no"]}, max_tokens=8)
    print(answer.text)

    code = "def add_one(x):\n    return x + 1\n\n\ndef add_two(x):\n    return x + 2\n\n\n"
    copied = client.generate(code, temperature=0, max_tokens=64, speculation={"max_draft_tokens": 8})
    print(f"{copied.usage.accepted_draft_tokens} of {copied.usage.completion_tokens} tokens came from drafts")
