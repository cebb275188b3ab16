"""Checks whether products of packed weights are batch invariant where the packer claims it. Run as a program, it prints
the result as JSON."""

import json
from collections.abc import Sequence

import torch

from engine_worker.layers.packing import LIBRARIES, Library, Packer

SHAPES = [(3, 8), (200, 64), (256, 640), (2500, 256), (896, 2432)]
"""(outputs, inputs) of each weight."""
BATCHES = (*range(1, 70), 127, 128, 129, 255, 300, 511, 512, 513, 700)


def broken_claims(libraries: Sequence[Library]) -> tuple[list[str], list[str]]:
    """The packer's claim for each shape, and the batches for which a claim is wrong."""
    claims, broken = [], []
    for outputs, inputs in SHAPES:
        random = torch.Generator().manual_seed(outputs)
        packer = Packer(libraries)
        product = packer.pack(torch.randn(outputs, inputs, generator=random))
        claims.append(f"{outputs} x {inputs}: {packer.summary}")
        if product is None or not packer.invariant:
            continue
        x = torch.randn(max(BATCHES), inputs, generator=random)
        whole = product(x, None)
        for rows in BATCHES:
            for part in (slice(rows), slice(-rows, None)):
                if not torch.equal(product(x[part], None), whole[part]):
                    broken.append(f"{claims[-1]}, but not {rows} rows")
    return claims, broken


if __name__ == "__main__":
    torch.set_num_threads(1)
    claims, broken = broken_claims(LIBRARIES)
    print(json.dumps({"claims": claims, "broken": broken}))
