"""The pages of a service's metrics port: /, /status.json, /metrics, /livez and /readyz."""

import base64
import hashlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
from prometheus_client import CollectorRegistry, make_wsgi_app

from sluice.host.installation import BUILD_VERSION
from sluice.settings.process import ProcessSettings
from sluice.telemetry.probes import Probes
from sluice.telemetry.status_report import ServiceReport, StatusReport

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse

    Application = Callable[[dict[str, Any], StartResponse], Iterable[bytes]]

Headers = list[tuple[str, str]]
COMMON: Headers = [("Cache-Control", "no-store"), ("X-Content-Type-Options", "nosniff")]
OK, NOT_FOUND, UNAVAILABLE = "200 OK", "404 Not Found", "503 Service Unavailable"


@dataclass(frozen=True, slots=True)
class PortOwner:
    """The service that a port belongs to."""

    service: str = ""
    """The service's role."""
    id: str = ""
    model: str = ""
    """The served name, or the path of the model."""

    @classmethod
    def of(cls, settings: ProcessSettings) -> "PortOwner":
        return cls(settings.role, settings.id, settings.model_name)


class Page(NamedTuple):
    """The sources of the pages' content. Their functions are called in the thread of the connection."""

    registry: CollectorRegistry
    probes: Probes
    owner: PortOwner = PortOwner()
    report: Callable[[], ServiceReport | None] = lambda: None


class Pages:
    """A WSGI application with the pages of a service."""

    def __init__(self, page: Page) -> None:
        self.page = page
        """Replaced when the service becomes ready."""
        self._started_at = time.monotonic()

    def __call__(self, environ: dict[str, Any], start: "StartResponse") -> Iterable[bytes]:
        path, page = environ["PATH_INFO"], self.page
        if path == "/metrics":
            metrics: Application = make_wsgi_app(page.registry)
            return metrics(environ, start)
        if path == "/":
            html, headers = _html()
            return _answer(start, OK, html, headers)
        if path == "/status.json":
            return _answer(start, OK, msgspec.json.encode(self._status(page)), [("Content-Type", "application/json")])
        probes = {"/livez": page.probes.dead, "/readyz": page.probes.not_ready}
        if path not in probes:
            return _text(start, NOT_FOUND, "not found: the pages are /, /status.json, /metrics, /livez and /readyz")
        problem = probes[path]()
        return _text(start, UNAVAILABLE, problem) if problem else _text(start, OK, "ok")

    def _status(self, page: Page) -> StatusReport:
        dead, not_ready = page.probes.dead(), page.probes.not_ready()
        return StatusReport(
            service=page.owner.service,
            id=page.owner.id,
            version=BUILD_VERSION,
            model=page.owner.model,
            time=time.time(),
            uptime=time.monotonic() - self._started_at,
            live=dead is None,
            ready=dead is None and not_ready is None,
            reason=dead or not_ready or "",
            report=page.report(),
        )


@cache
def _html() -> tuple[bytes, Headers]:
    """The status page, and its headers with a policy that allows only the page's own script and style."""
    page = files("sluice.telemetry").joinpath("status_page.html").read_text(encoding="utf-8")
    script, style = (_hash(page, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    headers = [("Content-Type", "text/html; charset=utf-8"), ("Content-Security-Policy", policy)]
    return page.encode(), [*headers, ("Referrer-Policy", "no-referrer")]


def _hash(page: str, tag: str) -> str:
    """Hash of the page's only element with this tag, in the form of a Content-Security-Policy."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


def _text(start: "StartResponse", status: str, text: str) -> Iterable[bytes]:
    return _answer(start, status, text.encode() + b"\n", [("Content-Type", "text/plain; charset=utf-8")])


def _answer(start: "StartResponse", status: str, body: bytes, headers: Headers) -> Iterable[bytes]:
    start(status, [*headers, *COMMON])
    return [body]
