"""Who may call what: bearer tokens, a function of the user's, or nobody is asked."""

from collections import Counter
from collections.abc import Sequence
from typing import NoReturn

from router.access.auth_hook import AuthHook, HookError, Peer
from router.access.bearer_tokens import Tokens
from router.access.principal import TENANT, Principal
from router.access.reloading_file import ReloadingFile
from router.errors import Call, RequestError, Violation
from router.validate.violations import shown
from sluice.ring.errors import ErrorCode

AUTHORIZATION = "authorization"

Metadata = Sequence[tuple[str, str | bytes]]


class Gate:
    """Before the calls of one listener. Without tokens and hook everybody may do everything."""

    def __init__(
        self,
        tokens: ReloadingFile[Tokens] | None,
        hook: AuthHook | None,
        refused: Counter[str],
        tenant_key: str,
    ) -> None:
        """`refused` counts by reason. In the metadata `tenant_key` callers without tokens say whose they are."""
        self._tokens = tokens
        self._hook = hook
        self._refused = refused
        self._tenant_key = tenant_key

    async def admit(self, call: Call, admin: bool = False) -> Principal:
        """Who calls. Raises RequestError: UNAUTHENTICATED, AUTH_UNAVAILABLE, FORBIDDEN."""
        metadata = [(key, value) for key, value in call.invocation_metadata() or ()]
        tenant = self._tenant(metadata)
        if self._tokens is None and self._hook is None:
            return Principal(tenant, admin=True)
        caller = self._by_token(metadata)
        if caller is None and self._hook is not None:
            caller = await self._by_hook(self._hook, metadata, call)
        if caller is None:
            reason = "unknown_token" if any(key == AUTHORIZATION for key, _ in metadata) else "no_token"
            self._refuse(ErrorCode.UNAUTHENTICATED, reason, "needs metadata authorization: Bearer TOKEN, a known one")
        if tenant not in ("", caller.tenant):
            self._refuse(ErrorCode.FORBIDDEN, "other_tenant", f"{self._tenant_key} is not the tenant of the token")
        if admin and not caller.admin:
            self._refuse(ErrorCode.FORBIDDEN, "not_admin", "AdminService needs a token that is marked admin")
        return caller

    def _by_token(self, metadata: Metadata) -> Principal | None:
        given = [str(value) for key, value in metadata if key == AUTHORIZATION]
        if self._tokens is None or len(given) != 1:
            return None
        scheme, _, token = given[0].partition(" ")
        return self._tokens.value.find(token.strip()) if scheme.lower() == "bearer" else None

    async def _by_hook(self, hook: AuthHook, metadata: Metadata, call: Call) -> Principal:
        try:
            return await hook.ask(dict(metadata), _peer(call))
        except HookError as error:
            codes = {"hook_refused": ErrorCode.FORBIDDEN, "hook_timeout": ErrorCode.AUTH_UNAVAILABLE}
            self._refuse(codes.get(error.reason, ErrorCode.UNAUTHENTICATED), error.reason, str(error))

    def _tenant(self, metadata: Metadata) -> str:
        given = [str(value) for key, value in metadata if key == self._tenant_key]
        if not given:
            return ""
        if len(given) > 1 or not TENANT.fullmatch(given[0]):
            problem = f"is {shown(', '.join(given))}, must be one name of up to 64 of [A-Za-z0-9._:-]"
            raise RequestError.invalid([Violation(self._tenant_key, problem)])
        return given[0]

    def _refuse(self, code: ErrorCode, reason: str, message: str) -> NoReturn:
        self._refused[reason] += 1
        raise RequestError(code, message, metadata={"cause": reason})


def _peer(call: Call) -> Peer:
    found = call.auth_context()
    names = found.get("x509_subject_alternative_name") or found.get("x509_common_name") or ()
    return Peer(call.peer(), tuple(bytes(name).decode("utf-8", "replace") for name in names))
