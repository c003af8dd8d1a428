"""Logs: one JSON object per line for programs, one short line of text for people."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from penstock.env import writes_json_log
from penstock.validation import printable

__all__ = ["LOG", "JsonLines", "TextLines", "note", "tell"]

LOG: Final = logging.getLogger("penstock.serving")


_encoded: Final = json.JSONEncoder(default=str).encode


def tell(event: str, message: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event of a model or a worker: ``event`` is its stable name for programs, ``message`` is for people."""
    LOG.log(level, message, extra={"facts": {"event": event, "message": message, **facts}})


def note(program: str, message: str, level: int = logging.INFO) -> None:
    """Write a note of a program for people to the standard error.

    In a service whose log has JSON lines it is such a line, so that a reader of the log can parse the whole stream.
    """
    line = f"{program}: {message}"
    if writes_json_log():
        record = logging.LogRecord(LOG.name, level, "", 0, message, None, None)
        record.facts = {"event": "note", "program": program, "message": message}
        line = JsonLines().format(record)
    with suppress(OSError):  # a full disk or a closed pipe must not end the program
        print(line, file=sys.stderr, flush=True)


class JsonLines(logging.Formatter):
    """Format a record as JSON: ``time`` (UTC), ``level``, the record's ``facts`` or else its ``message``, ``trace``."""

    _last = -1, ""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        second, text = self._last
        if int(record.created) != second:  # most records share their second with the previous one
            second = int(record.created)
            text = datetime.fromtimestamp(second, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            self._last = second, text
        time = f"{text}.{int(record.created * 1000) % 1000:03d}+00:00"
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower()}
        facts = getattr(record, "facts", None)
        line |= {"message": record.getMessage()} if facts is None else facts
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return _encoded(line)


class TextLines(logging.Formatter):
    """Format a record for a terminal: the local time, and a message or a request with its status and duration."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, and a traceback below it where there is one."""
        time = datetime.fromtimestamp(record.created).astimezone().strftime("%H:%M:%S")
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        facts: dict[str, Any] = getattr(record, "facts", {})
        text = self._request(facts) if "method" in facts else str(facts.get("message", record.getMessage()))
        trace = f"\n{self.formatException(record.exc_info)}" if record.exc_info else ""
        line = printable(f"{time} {level}{text}")
        return line + trace

    def _request(self, facts: dict[str, Any]) -> str:
        status = facts.get("code", facts["status"])
        parts = [f"{facts['method']} {facts['path']} {status} in {facts['seconds'] * 1e3:,.0f} ms"]
        known = ("request_id", "method", "path", "status", "code", "seconds", "error")
        parts += [f"{name} {value}" for name, value in facts.items() if name not in known and value not in (None, "")]
        return ", ".join(parts) + (f": {facts['error']}" if "error" in facts else "")
