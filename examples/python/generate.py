"""Three samples with their finish reasons, and the error of an invalid request."""

from sluice import Client
from sluice.client import InvalidRequest

with Client("127.0.0.1:50051", timeout=60) as client:
    generation = client.generate("import ", n=3, seed=7, max_tokens=16, stop="\n")
    for output in generation.outputs:
        print(f"{output.index}: {output.text!r} ended by {output.finish_reason}")
    print(generation.usage)

    try:
        client.generate("import ", temperature=9)
    except InvalidRequest as error:
        for violation in error.violations:
            print(f"{violation.field} {violation.description}")
