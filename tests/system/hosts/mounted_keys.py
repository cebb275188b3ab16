"""The ring's keys as Kubernetes mounts Secrets: each service has its own secret key and all public ones."""

import secrets
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from sluice.ring.keys import ROLES, Role, generate, retire

SECRET_MODE = 0o440


class MountedSecret:
    """A volume of a Secret: its files are links into a folder that is replaced as a whole."""

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
    """The operator's folder of `sluice keygen`, and what each service sees of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: list[tuple[Role, MountedSecret]] = []
        self._public: list[MountedSecret] = []
        for role in ROLES:
            generate(folder, role)

    def mount(self, role: Role) -> Path:
        """A new folder for a service's setting `keys`."""
        mounted = self._folder / f"{role}-{secrets.token_hex(3)}"
        own, public = MountedSecret(mounted / "secret"), MountedSecret(mounted / "public")
        own.write(self._secret(role))
        public.write(self._public_keys())
        self._own.append((role, own))
        self._public.append(public)
        return mounted

    def announce(self, role: Role) -> None:
        """Make a new pair, and tell all its public key."""
        generate(self._folder, role)
        for mounted in self._public:
            mounted.write(self._public_keys())

    def adopt(self, role: Role) -> None:
        """Services of this role get the secret key of the latest pair."""
        for holder, mounted in self._own:
            if holder == role:
                mounted.write(self._secret(role))

    def retire(self, role: Role) -> None:
        """The former public key is no longer valid."""
        retire(self._folder, role)
        for mounted in self._public:
            mounted.write(self._public_keys())

    def _secret(self, role: Role) -> dict[str, bytes]:
        return {f"{role}.key": (self._folder / "secret" / f"{role}.key").read_bytes()}

    def _public_keys(self) -> dict[str, bytes]:
        return {f"{role}.key": (self._folder / "public" / f"{role}.key").read_bytes() for role in ROLES}
