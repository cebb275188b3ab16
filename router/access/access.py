"""Who may connect and call, as the settings say: certificates, tokens, a function of the user's."""

from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

from structlog.stdlib import BoundLogger

from router.access.auth_hook import AuthHook
from router.access.authenticate import Gate
from router.access.bearer_tokens import Tokens, read_tokens
from router.access.principal import Admit, Principal
from router.access.reloading_file import ReloadingFile, Reloads
from router.access.tls import Certificates, Handshakes
from router.errors import Call
from sluice.ring.named import find
from sluice.settings.services import RouterSettings

T = TypeVar("T")


class AccessError(RuntimeError):
    """Files or a function that cannot be used."""


class Access:
    """Shared by the listeners of a router. Raises AccessError."""

    def __init__(self, settings: RouterSettings, logger: BoundLogger) -> None:
        self.refused: Counter[str] = Counter()
        """Calls, by reason."""
        self.certificates = _certificates(settings)
        self.handshakes = Handshakes() if self.certificates is None else self.certificates.handshakes
        tokens = _tokens(settings.tokens_file)
        admin_tokens = _tokens(settings.admin_tokens_file)
        hook = _hook(settings, logger)
        self._callers = Gate(tokens, hook, self.refused, settings.tenant_key)
        self._admins = (
            self._callers if admin_tokens is None else Gate(admin_tokens, None, self.refused, settings.tenant_key)
        )
        watched: list[ReloadingFile[Any]] = [files for files in (tokens, admin_tokens) if files is not None]
        if self.certificates is not None:
            watched.append(self.certificates.files)
        self.reloads = Reloads(watched, logger)

    async def caller(self, call: Call) -> Principal:
        """For what is there for everybody. Raises RequestError."""
        return await self._callers.admit(call)

    async def admin(self, call: Call) -> Principal:
        """For AdminService. Raises RequestError."""
        return await self._admins.admit(call, admin=True)

    def counted(self, admit: Admit) -> Admit:
        """`admit`, which also counts the connections that bring calls."""
        if self.certificates is None:
            return admit

        async def count(call: Call) -> Principal:
            self.handshakes.use(call.peer())
            return await admit(call)

        return count


def _certificates(settings: RouterSettings) -> Certificates | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None
    return _read("the TLS files", lambda: Certificates(certificate, key, settings.tls_client_ca))


def _tokens(path: str | None) -> ReloadingFile[Tokens] | None:
    return None if path is None else _read("the tokens", lambda: ReloadingFile([path], lambda: read_tokens(path)))


def _hook(settings: RouterSettings, logger: BoundLogger) -> AuthHook | None:
    name = settings.auth
    if name is None:
        return None
    function = _read(f"auth {name!r}", lambda: find(name))
    if not callable(function):
        raise AccessError(f"auth {name!r} cannot be called")
    return AuthHook(function, settings.auth_timeout, logger)


def _read(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, ValueError) as error:
        raise AccessError(f"{what} cannot be used: {error}") from error
