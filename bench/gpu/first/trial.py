"""python -m bench.gpu.first.trial WORK: tries one kernel out, in this process, and writes a line of JSON per place."""

import json
import sys
import time

import torch

from bench.gpu.findings import RUNS
from bench.gpu.first.subjects import Place, Trial, subjects
from engine_worker.attention.backend import HeadShape, Refusal, RefusedError

BEGUN, MARK = "begun: ", "tried: "
"""Before each line: libraries print too."""


def main(arguments: list[str]) -> None:
    """WORK is JSON: the title, rounds, device, dtype and places."""
    work = json.loads(arguments[0])
    trial = subjects()[work["title"]]
    device, dtype = torch.device(work["device"]), getattr(torch, work["dtype"])
    for heads, hidden_size, windowed in work["places"]:
        place = Place(HeadShape(*heads), hidden_size, windowed, dtype, device)
        print(BEGUN + str(place), flush=True)
        told = {"place": str(place), **run(trial, place, work["rounds"])}
        print(MARK + json.dumps(told), flush=True)


@torch.inference_mode()
def run(trial: Trial, place: Place, rounds: int) -> dict[str, str | float | int]:
    """How it ended, and how long the first round, which compiles, and the fastest took."""
    seconds: list[float] = []
    for _ in range(rounds):
        began = time.perf_counter()
        try:
            trial(place)
        except RefusedError as error:
            return {"ended": str(error), "absent": error.kind is Refusal.ABSENT}
        except Exception as error:  # noqa: BLE001 - what a foreign package raises is what is to be found out
            return {"ended": str(RefusedError.of(error)), "absent": isinstance(error, ModuleNotFoundError)}
        seconds.append(time.perf_counter() - began)
    return {"ended": RUNS, "absent": False, "first": seconds[0], "fastest": min(seconds)}


if __name__ == "__main__":
    main(sys.argv[1:])
