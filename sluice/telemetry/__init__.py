"""structlog set-up, the same in every process: JSON lines unless a person is watching; never prompt text by default."""

import logging
import sys
import traceback

import structlog


def configure(service: str, level: str = "info", exception_texts: bool = False) -> structlog.stdlib.BoundLogger:
    """Set up logging to stderr for this process and return its logger, bound to the service's name.

    `exception_texts` is for a process that sees no prompts and no secrets: what an exception says may quote them.
    """
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info
            if exception_texts
            else structlog.processors.ExceptionRenderer(types_and_places),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    logger: structlog.stdlib.BoundLogger = structlog.get_logger().bind(service=service)
    return logger


def types_and_places(exc_info: structlog.typing.ExcInfo) -> str:
    """A traceback without what its exceptions say; causes follow."""
    parts: list[str] = []
    error: BaseException | None = exc_info[1]
    while error is not None:
        parts += [*traceback.format_tb(error.__traceback__), f"{type(error).__module__}.{type(error).__qualname__}\n"]
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "".join(parts).rstrip()
