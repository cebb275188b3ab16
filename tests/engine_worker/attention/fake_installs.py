"""Devices, and stand-ins for installed kernels, between which an attention backend is chosen."""

import dataclasses
from types import ModuleType

import torch
from torch.nn.attention import varlen as torch_varlen
from torch.torch_version import TorchVersion

from engine_worker.attention.backend import HeadShape, Site
from engine_worker.attention.cache import store_by_torch
from tests.engine_worker.attention import flash_fakes

CPU = torch.device("cpu")
HEADS = HeadShape(4, 2, 16)
HOPPER = Site(CPU, (9, 0), torch.bfloat16, HEADS, (None, 30), 0)
"""The device is a CPU; only the reported compute capability is that of a GPU."""
AMPERE = dataclasses.replace(HOPPER, capability=(8, 0))


def has_torch(monkeypatch, version: str) -> None:
    """Let torch be of this version, with the `varlen_attn` that it has."""
    major, minor, _ = version.split(".")
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setattr(torch_varlen, "varlen_attn", flash_fakes.varlen((int(major), int(minor))))


def with_store(function) -> ModuleType:
    """A stand-in for `engine_worker.attention.kernels` that has only `store`."""
    module = ModuleType("kernels")
    module.store = function
    return module


def with_attend() -> ModuleType:
    """A stand-in for `engine_worker.attention.kernels` whose functions use torch."""
    module = with_store(store_by_torch)

    def attend(query, cache, inputs, scale, window):
        starts, lengths = inputs.query_start.tolist(), inputs.context_lengths.tolist()
        bounds = (-1, 0) if window is None else (window - 1, 0)
        return flash_fakes.paged(query, cache.keys, cache.values, inputs.block_tables, starts, lengths, scale, bounds)

    module.attend = attend
    return module
