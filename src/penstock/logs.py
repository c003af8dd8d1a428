"""Structured logs: one JSON object per line."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["LOG", "JsonLines", "tell"]

LOG: Final = logging.getLogger("penstock.serving")


_encoded: Final = json.JSONEncoder(default=str).encode


def tell(event: str, message: str, level: int = logging.INFO, **facts: Any) -> None:
    """Log an event of a model or a worker: ``event`` is its stable name for programs, ``message`` is for people."""
    LOG.log(level, message, extra={"facts": {"event": event, "message": message, **facts}})


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
