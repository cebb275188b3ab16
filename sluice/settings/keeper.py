"""Settings of the keeper."""

from pathlib import Path
from typing import ClassVar

from pydantic.dataclasses import dataclass as validated

from sluice.lanes.keys import Keys, Security
from sluice.settings.fields import ByteCount
from sluice.settings.process import STRICT, ProcessSettings


@validated(frozen=True, kw_only=True, config=STRICT)
class KeeperSettings(ProcessSettings):
    """Keeper"""

    role: ClassVar[str] = "keeper"
    module: ClassVar[str] = "engine_worker.keeper"
    summary: ClassVar[str] = "Hands out the KV blocks of this machine's engines to engines on other machines."

    kv_folder: Path
    """The `kv_folder` of this machine's engines."""
    listen: str = "tcp://127.0.0.1:*"
    """Address for engines on other machines: tcp://host:port or ipc:///path. A port of * is any free port, a host of *
    every interface."""
    keys: Path | None = None
    """Folder with the ring's keys; the keeper needs the engine's secret key, and admits engines only. Required for
    tcp://, unless insecure_ring is set."""
    insecure_ring: bool = False
    """Allow tcp:// without keys. Any host that can reach the port can then read the KV blocks, which are the text of
    prompts."""
    disk_folder: Path | None = None
    """Folder on a disk to which long prefixes are copied, and from which they are read when no engine has them any
    more. It must be closed to other users (mode 700). Default: none."""
    disk_bytes: ByteCount = 16 << 30
    """Maximum size of the blocks in disk_folder. Those that were not used for longest are deleted."""

    @property
    def security(self) -> Security:
        """The keys with which the keeper answers engines. Raises KeysError."""
        return Security(None if self.keys is None else Keys(self.keys, "engine", ("engine",)), self.insecure_ring)
