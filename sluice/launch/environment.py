"""The environment variables of services."""

import os
import sysconfig
from pathlib import Path

REMOTE = ("SLUICE_ROUTER_", "SLUICE_ENGINE_", "SLUICE_DETOK_", "NCCL_")
"""Prefixes of the environment variables that are passed to services on other machines.

Credentials such as HF_TOKEN are not passed, because Ray displays the environment.
"""
TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
"""Not inherited by services: if a torchrun process starts a ring, the ring's engines are not torchrun's ranks."""


def child_environment() -> dict[str, str]:
    """The environment of services on this machine."""
    inherited = {name: value for name, value in os.environ.items() if name not in TORCHRUN}
    # PASSIVE, because engine threads that spin at barriers take cores from the router, and even from the thread that
    # they wait for: on two busy cores, a step of the tiny model took 100 ms instead of 8 ms.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **inherited}
    root = Path(__file__).parents[2]
    if root != Path(sysconfig.get_path("purelib")):
        # This is a checkout that may not be installed. Services run in the user's folder and would not find it.
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH", "")]))
    return environment


def remote_environment() -> dict[str, str]:
    """The part of `child_environment` for services on other machines: settings, NCCL's variables, a checkout's path."""
    variables = child_environment().items()
    return {name: value for name, value in variables if name == "PYTHONPATH" or name.startswith(REMOTE)}
