"""Structured logs: one event name plus fields, as console text or JSON lines."""

from __future__ import annotations

import json
import logging
import sys
import time

_logger = logging.getLogger("pegaflow")

LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}


def _plain(value: object) -> object:
    """Bytes as hex, numbers and text as they are, the rest by ``str``."""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, (str, int, float, bool)) or value is None:
        return value
    return str(value)


def _on_one_line(value: object) -> str:
    """Quoted where a space or a control character would forge another field or line."""
    text = str(value)
    return text if text.isprintable() and " " not in text else repr(text)


class _Formatter(logging.Formatter):
    def __init__(self, *, as_json: bool) -> None:
        super().__init__()
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        fields: dict[str, object] = getattr(record, "fields", {})
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        head = f"{stamp}.{int(record.msecs):03d}Z"
        plain = {name: _plain(value) for name, value in fields.items()}
        if record.exc_info:
            plain["traceback"] = self.formatException(record.exc_info)
        if self._as_json:
            return json.dumps(
                {"time": head, "level": record.levelname.lower(), "event": record.getMessage()}
                | plain
            )
        traceback = f"\n{plain.pop('traceback')}" if "traceback" in plain else ""
        text = " ".join(f"{name}={_on_one_line(value)}" for name, value in plain.items())
        line = f"{head} {record.levelname.lower():7} {record.getMessage()} {text}".rstrip()
        return line + traceback


def configure(level: str = "info", *, as_json: bool = False) -> None:
    """Send the project's log to standard error.  Called once by a program's entry point."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(as_json=as_json))
    _logger.handlers[:] = [handler]
    _logger.propagate = False
    set_level(level)


def set_level(level: str) -> None:
    """Change the level at run time; ``level`` is one of :data:`LEVELS`."""
    _logger.setLevel(LEVELS[level])


def debug(event: str, **fields: object) -> None:
    """Log at level debug."""
    _logger.debug(event, extra={"fields": fields})


def info(event: str, **fields: object) -> None:
    """Log at level info."""
    _logger.info(event, extra={"fields": fields})


def warning(event: str, **fields: object) -> None:
    """Log at level warning."""
    _logger.warning(event, extra={"fields": fields})


def error(event: str, *, exc: BaseException | None = None, **fields: object) -> None:
    """Log at level error; ``exc`` adds its traceback."""
    _logger.error(event, exc_info=exc, extra={"fields": fields})
