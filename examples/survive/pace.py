"""A logits processor that slows the tiny model down to a readable speed."""

import time

SECONDS_PER_TOKEN = 0.03


def pace(*_: object) -> None:
    """Wait, without changing the logits."""
    time.sleep(SECONDS_PER_TOKEN)
