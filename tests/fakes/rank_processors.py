"""Logits processors that record the arguments of their calls on each rank, or misbehave on all ranks but rank 0."""

import json
import math
import os
import time
from hashlib import sha256
from pathlib import Path

import torch
import torch.distributed as dist

FOLDER = "SLUICE_TEST_CALLS"
"""The environment variable with the folder for the records. If it is unset, nothing is recorded."""
KEPT = []
"""Logits that `keep_there` has kept, to write to them in later calls."""


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def calls(folder: Path, number: int) -> list:
    """The recorded calls on rank `number`, in order."""
    return [json.loads(line) for line in (folder / str(number)).read_text().splitlines()]


def record(name, request_ids, logits, token_ids, client_ids) -> None:
    if folder := os.environ.get(FOLDER):
        bits = [sha256(rows.numpy().tobytes()).hexdigest() for rows in logits]
        shapes = [list(rows.shape) for rows in logits]
        with (Path(folder) / str(rank())).open("a") as file:
            file.write(json.dumps([name, request_ids, bits, shapes, token_ids, client_ids]) + "\n")


def shift(request_id, logits, token_ids, stream, client_id):
    """Edit the logits by an amount that depends on all tokens so far."""
    record("shift", [request_id], [logits], [token_ids], [client_id])
    logits += torch.arange(logits.shape[-1]) * sum(token_ids[0]) % 7 / 4


def batched(request_ids, logits, token_ids, stream, client_ids):
    record("batched", request_ids, logits, token_ids, client_ids)
    for rows, (tokens,) in zip(logits, token_ids, strict=True):
        rows[..., tokens[-1]] = -math.inf


def raise_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        raise KeyError("on this rank only")


def write_nan_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        logits.fill_(math.nan)
        token_ids[0].clear()


def keep_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        for earlier_logits in KEPT:
            earlier_logits.fill_(math.inf)
        KEPT.append(logits)


def hang_there(request_id, logits, token_ids, stream, client_id):
    if rank():
        time.sleep(3600)
