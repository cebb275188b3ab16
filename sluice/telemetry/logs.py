"""Logging by structlog, set up alike in every process: JSON lines, or readable text on a terminal. Logs never contain
prompt text."""

import logging
import sys
import traceback
from collections.abc import Callable

import structlog

from sluice.host.output import SafeStream

Render = Callable[[structlog.typing.WrappedLogger, str, structlog.typing.EventDict], str]


def configure(service: str, level: str = "info", exception_texts: bool = False) -> structlog.stdlib.BoundLogger:
    """Set up logging to stderr. After `output.protect_stderr`, logging never raises and never blocks.

    Set `exception_texts` only in a process that handles neither prompts nor secrets: messages of exceptions may quote
    them.
    """
    render = with_fallback(
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    stamp = structlog.processors.TimeStamper(fmt="iso", utc=True)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            stamp,
            structlog.processors.format_exc_info
            if exception_texts
            else structlog.processors.ExceptionRenderer(types_and_places),
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    if isinstance(sys.stderr, SafeStream):
        sys.stderr.notice = lambda lines: render(
            None,
            "warning",
            stamp(None, "warning", {"service": service, "lines": lines, "event": "log_lines_lost", "level": "warning"}),
        )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger().bind(service=service)
    return logger


def with_fallback(render: structlog.typing.Processor) -> Render:
    """A renderer that omits values that cannot be rendered, such as one whose repr raises, and lists their keys."""

    def render_any(logger: structlog.typing.WrappedLogger, method: str, event: structlog.typing.EventDict) -> str:
        try:
            return str(render(logger, method, dict(event)))
        except Exception as error:  # noqa: BLE001 - a log line must not fail the work that it reports
            plain = {key: value for key, value in event.items() if type(value) in (str, int, float, bool, type(None))}
            omitted = ",".join(sorted(event.keys() - plain.keys()))
            plain |= {"unrendered": omitted, "render_error": type(error).__name__}
            return str(render(logger, method, {"event": "", **plain}))

    return render_any


def types_and_places(exc_info: structlog.typing.ExcInfo) -> str:
    """A traceback without the exceptions' messages, followed by those of its causes."""
    parts: list[str] = []
    error: BaseException | None = exc_info[1]
    while error is not None:
        parts += [*traceback.format_tb(error.__traceback__), f"{type(error).__module__}.{type(error).__qualname__}\n"]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "".join(parts).rstrip()
