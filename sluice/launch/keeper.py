"""The keeper of a ring: the options that ask for one, and whether the engines have blocks that it can hand out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sluice.host.address import is_tcp_socket
from sluice.lanes.keys import InsecureError, KeysError
from sluice.launch.errors import OptionsError
from sluice.settings.keeper import KeeperSettings
from sluice.settings.services import EngineSettings

KEEPER = KeeperSettings.role


def asks_for_keeper(kv_keeper: str | None, kv_disk: str | Path | None) -> str:
    """The name of the option that asks for a keeper. Empty: there is none."""
    options = {"kv_keeper": kv_keeper, "kv_disk": kv_disk}
    return next((name for name, value in options.items() if value is not None), "")


def check_keeper_options(
    kv_keeper: str | None, kv_disk: str | Path | None, engine: Mapping[str, Any], keeper: Mapping[str, Any]
) -> None:
    """Raises OptionsError for options that contradict each other. `engine`, `keeper`: settings of these services."""
    option = asks_for_keeper(kv_keeper, kv_disk)
    if not option and keeper:
        raise OptionsError(
            f"keeper_args: {next(iter(keeper))} has no effect without a keeper: set kv_keeper or kv_disk"
        )
    if option and engine.get("kv_keeper") is not None:
        raise OptionsError(f"{option} contradicts engine_args: kv_keeper is {engine['kv_keeper']}, another keeper")
    if kv_keeper is not None and not (is_tcp_socket(kv_keeper) or kv_keeper.startswith("ipc:///")):
        raise OptionsError(
            "kv_keeper must be tcp://IP:PORT, with an address of this machine at which other machines reach it, or "
            f"ipc:///path (got {kv_keeper!r})"
        )


def check_access(keeper: KeeperSettings) -> None:
    """Raises OptionsError if others could read the blocks."""
    try:
        keeper.security.check(keeper.listen)
    except (InsecureError, KeysError) as error:
        raise OptionsError(f"kv_keeper: {error}") from error


def check_blocks(option: str, engine: EngineSettings, has_gpus: bool, private: str) -> None:
    """Raises OptionsError if the engines would have no blocks for the keeper, or would not ask it.

    `option`: the one that asks for the keeper. `private`: why their KV caches are in private memory; empty if they are
    not.
    """
    reason = ""
    if private:
        reason = f"the KV caches are in private memory: {private}"
    elif has_gpus and not engine.kv_host_memory:
        reason = "engines on GPUs need kv_host_memory, or device = cpu"
    elif not engine.kv_fetch:
        reason = "kv_fetch is off, so no engine would ask it"
    if reason:
        raise OptionsError(f"{option}: a keeper hands out what engines have in files in memory, but {reason}")
