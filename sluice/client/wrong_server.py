"""Recognizes a server of another kind, or with other TLS settings, by gRPC's message for a failed connection."""

from sluice.client.errors import HTTP_STATUS, Unreachable

NOT_HTTP_2 = ("http1.x server", "failed parsing http/2")
CLOSED = ("socket closed", "connection reset", "broken pipe")


def explain(error: Unreachable, address: str, uses_tls: bool) -> str | None:
    """What is probably wrong with a connection that failed with this error of gRPC. None: nothing that is known."""
    text = error.message.lower()
    if any(mark in text for mark in NOT_HTTP_2):
        return (
            f"{address} does not speak HTTP/2, so it may be the port of a gateway or of metrics: use the router's "
            "port, 50051 unless set by --port"
        )
    if HTTP_STATUS in text:
        return f"a proxy answers at {address}, but reaches no router ({error.message})"
    is_closed = any(mark in text for mark in CLOSED)
    if uses_tls:
        return _explain_tls(text, error.cause, address, is_closed)
    if is_closed:
        return (
            f"{address} closes connections without TLS, so it may require TLS: --tls-ca FILE, in Python "
            "tls=TlsOptions(ca=FILE); or it is a proxy without a router behind it"
        )
    return None


def _explain_tls(text: str, cause: str, address: str, is_closed: bool) -> str | None:
    if "wrong_version_number" in text:
        return f"{address} does not answer with TLS: if it is a router without TLS, omit --tls-ca, in Python tls"
    if "certificate_verify_failed" in text:
        return f"the certificate of {address} is not valid, or not signed by an authority in --tls-ca ({cause})"
    if is_closed:
        return (
            f"{address} closes connections during TLS, so it may require a client certificate: --tls-cert and "
            "--tls-key, in Python TlsOptions(certificate=..., key=...)"
        )
    return None
