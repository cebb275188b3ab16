"""Logits processors that write down what each rank calls them with, and misbehave on one rank."""

import json
import math
import os
import time
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = "SLUICE_TEST_CALLS"
"""Variable with the folder for the records; unset: none are written."""
KEPT = []


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def calls(folder: Path, number: int) -> list:
    """Those on this rank, in order."""
    return [json.loads(line) for line in (folder / str(number)).read_text().splitlines()]


def record(name, request_ids, logits, token_ids, client_ids) -> None:
    if folder := os.environ.get(FOLDER):
        bits = [sha256(each.numpy().tobytes()).hexdigest() for each in logits]
        shapes = [list(each.shape) for each in logits]
        with (Path(folder) / str(rank())).open("a") as file:
            file.write(json.dumps([name, request_ids, bits, shapes, token_ids, client_ids]) + "\n")


def shift(request_id, logits, token_ids, stream, client_id):
    """Depends on all tokens so far."""
    record("shift", [request_id], [logits], [token_ids], [client_id])
    logits += torch.arange(logits.shape[-1]) * sum(token_ids[0]) % 7 / 4


def batched(request_ids, logits, token_ids, stream, client_ids):
    record("batched", request_ids, logits, token_ids, client_ids)
    for each, (tokens,) in zip(logits, token_ids, strict=True):
        each[..., tokens[-1]] = -math.inf


def raise_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        raise KeyError("on this rank only")


def write_nan_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        logits.fill_(math.nan)
        token_ids[0].clear()


def keep_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        for each in KEPT:
            each.fill_(math.inf)
        KEPT.append(logits)


def hang_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        time.sleep(3600)
