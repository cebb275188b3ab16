"""A logits processor that slows the tiny model down to a speed that one can follow."""

import time

SECONDS_PER_TOKEN = 0.03


def pace(*_: object) -> None:
    """Changes nothing: the text is that of a request without it."""
    time.sleep(SECONDS_PER_TOKEN)
