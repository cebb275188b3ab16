"""The ring's keys as Kubernetes mounts Secrets: each service has its secret key and all public keys."""

import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sluice.lanes.keys import ROLES, Role, generate, retire

SECRET_MODE = 0o440


class MountedSecret:
    """A Secret volume: its files are links into a folder that is replaced atomically."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)

    def write(self, files: Mapping[str, bytes]) -> None:
        version = self._folder / f"..{secrets.token_hex(4)}"
        version.mkdir()
        for name, content in files.items():
            (version / name).write_bytes(content)
            (version / name).chmod(SECRET_MODE)
            with suppress(FileExistsError):
                (self._folder / name).symlink_to(f"..data/{name}")
        new = self._folder / "..data_new"
        new.symlink_to(version.name)
        new.replace(self._folder / "..data")


class MountedKeys:
    """The operator's folder of `sluice keygen`, and the volumes that services mount."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._secrets: list[tuple[Role, MountedSecret]] = []
        self._public: list[MountedSecret] = []
        for role in ROLES:
            generate(folder, role)

    def mount(self, role: Role) -> Path:
        """Mount a new folder for the setting `keys` of a service."""
        mounted = self._folder / f"{role}-{secrets.token_hex(3)}"
        secret, public = MountedSecret(mounted / "secret"), MountedSecret(mounted / "public")
        secret.write(self._secret(role))
        public.write(self._public_keys())
        self._secrets.append((role, secret))
        self._public.append(public)
        return mounted

    def announce(self, role: Role) -> None:
        """Generate a new key pair, and publish its public key to all services."""
        generate(self._folder, role)
        for mounted in self._public:
            mounted.write(self._public_keys())

    def adopt(self, role: Role) -> None:
        """Give services of this role the secret key of the latest pair."""
        for holder, mounted in self._secrets:
            if holder == role:
                mounted.write(self._secret(role))

    def retire(self, role: Role) -> None:
        """Invalidate the former public key."""
        retire(self._folder, role)
        for mounted in self._public:
            mounted.write(self._public_keys())

    def _secret(self, role: Role) -> dict[str, bytes]:
        return {f"{role}.key": (self._folder / "secret" / f"{role}.key").read_bytes()}

    def _public_keys(self) -> dict[str, bytes]:
        return {f"{role}.key": (self._folder / "public" / f"{role}.key").read_bytes() for role in ROLES}
