"""Access control as configured in the settings: TLS certificates, bearer tokens, an authentication hook."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, TypeVar

from structlog.stdlib import BoundLogger

from router.access.auth_hook import AuthHook, ClientPeer
from router.access.bearer_tokens import BearerTokens, read_tokens
from router.access.principal import TENANT, Admit, Principal
from router.access.reloading_file import Reloader, ReloadingFile
from router.access.tls import Certificates, Handshakes
from router.errors import Call, Reason, RequestError, shown
from sluice.settings.names import find_function
from sluice.settings.services import RouterSettings
from sluice.wire.errors import ErrorCode

AUTHORIZATION = "authorization"
UNAUTHENTICATED = {
    "no_token": "the call has no token, must have metadata `authorization: Bearer TOKEN`",
    "unknown_token": "metadata `authorization` must be `Bearer TOKEN` with a token that this server accepts",
}
"""Messages by the reason for which a call is refused."""

Metadata = Sequence[tuple[str, str | bytes]]
T = TypeVar("T")


class AccessError(RuntimeError):
    """A file or hook named in the settings is unusable."""


class Access:
    """Access control of a router, shared by its listeners. Raises AccessError."""

    def __init__(self, settings: RouterSettings, log: BoundLogger) -> None:
        self.refused: Counter[str] = Counter()
        """Number of refused calls by reason."""
        self.certificates = _certificates(settings)
        self.handshakes = Handshakes() if self.certificates is None else self.certificates.handshakes
        tokens = _tokens(settings.tokens_file)
        admin_tokens = _tokens(settings.admin_tokens_file)
        hook = _hook(settings, log)
        admins = callers = Authenticator(tokens, hook, self.refused, settings.tenant_key)
        # Tokens of the admin port replace both the tokens and the hook of the main port.
        if admin_tokens is not None:
            admins = Authenticator(admin_tokens, None, self.refused, settings.tenant_key)
        self.caller: Admit = callers.admit
        """Authenticates calls of all services except AdminService."""
        self.admin: Admit = partial(admins.admit, admin=True)
        """Authenticates calls of AdminService."""
        watched: list[ReloadingFile[Any]] = [files for files in (tokens, admin_tokens) if files is not None]
        if self.certificates is not None:
            watched.append(self.certificates.files)
        self.reloads = Reloader(watched, log)

    def counted(self, admit: Admit) -> Admit:
        """Wraps `admit` so that it also counts the TLS connections that carry calls."""
        if self.certificates is None:
            return admit

        async def count(call: Call) -> Principal:
            self.handshakes.use(call.peer())
            return await admit(call)

        return count


@dataclass(frozen=True)
class Authenticator:
    """Authenticates the calls of one listener. If there are neither tokens nor a hook, every caller is an admin."""

    _tokens: ReloadingFile[BearerTokens] | None
    _hook: AuthHook | None
    _refused: Counter[str]
    """Number of refused calls by reason."""
    _tenant_key: str
    """Key of the metadata entry that names the tenant."""

    async def admit(self, call: Call, admin: bool = False) -> Principal:
        """The authenticated caller. Raises RequestError UNAUTHENTICATED, AUTH_UNAVAILABLE or FORBIDDEN."""
        metadata = [(key, value) for key, value in call.invocation_metadata() or ()]
        tenant = self._tenant(metadata)
        if self._tokens is None and self._hook is None:
            return Principal(tenant, admin=True)
        caller = self._by_token(metadata)
        if caller is None and self._hook is not None:
            caller = await self._by_hook(self._hook, metadata, call)
        if caller is None:
            reason = "unknown_token" if any(key == AUTHORIZATION for key, _ in metadata) else "no_token"
            self._refuse(ErrorCode.UNAUTHENTICATED, reason, UNAUTHENTICATED[reason])
        if tenant not in ("", caller.tenant):
            self._refuse(ErrorCode.FORBIDDEN, "other_tenant", f"{self._tenant_key} does not match the token's tenant")
        if admin and not caller.admin:
            self._refuse(ErrorCode.FORBIDDEN, "not_admin", "AdminService needs a token that is marked admin")
        return caller

    def _by_token(self, metadata: Metadata) -> Principal | None:
        values = [str(value) for key, value in metadata if key == AUTHORIZATION]
        if self._tokens is None or len(values) != 1:
            return None
        scheme, _, token = values[0].partition(" ")
        return self._tokens.value.find(token.strip()) if scheme.lower() == "bearer" else None

    async def _by_hook(self, hook: AuthHook, metadata: Metadata, call: Call) -> Principal:
        try:
            return await hook.authenticate(dict(metadata), _client_peer(call))
        except RequestError as error:
            self._refused[error.metadata["cause"]] += 1
            raise

    def _tenant(self, metadata: Metadata) -> str:
        values = [str(value) for key, value in metadata if key == self._tenant_key]
        if not values:
            return ""
        if len(values) > 1 or not TENANT.fullmatch(values[0]):
            problem = f"is {shown(', '.join(values))}, must be one name of 1 to 64 characters of [A-Za-z0-9._:-]"
            raise RequestError.at(self._tenant_key, problem, reason=Reason.INVALID_FORMAT)
        return values[0]

    def _refuse(self, code: ErrorCode, reason: str, message: str) -> NoReturn:
        self._refused[reason] += 1
        raise RequestError(code, message, metadata={"cause": reason})


def _client_peer(call: Call) -> ClientPeer:
    auth = call.auth_context()
    names = auth.get("x509_subject_alternative_name") or auth.get("x509_common_name") or ()
    return ClientPeer(call.peer(), tuple(bytes(name).decode("utf-8", "replace") for name in names))


def _certificates(settings: RouterSettings) -> Certificates | None:
    certificate, key = settings.tls_certificate, settings.tls_key
    if certificate is None or key is None:
        return None
    return _read("the TLS files", lambda: Certificates(certificate, key, settings.tls_client_ca))


def _tokens(path: str | None) -> ReloadingFile[BearerTokens] | None:
    return None if path is None else _read("the tokens", lambda: ReloadingFile([path], lambda: read_tokens(path)))


def _hook(settings: RouterSettings, log: BoundLogger) -> AuthHook | None:
    name = settings.auth
    if name is None:
        return None
    try:
        function = find_function("auth", name)
    except ValueError as error:
        raise AccessError(str(error)) from error
    return AuthHook(function, settings.auth_timeout, log)


def _read(what: str, read: Callable[[], T]) -> T:
    try:
        return read()
    except (OSError, ValueError) as error:
        raise AccessError(f"{what} cannot be used: {error}") from error
