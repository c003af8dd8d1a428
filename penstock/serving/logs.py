"""Logs as lines of JSON, one object a line and nothing around it, as collectors read them."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Final

__all__ = ["JsonLines", "tell"]

LOG: Final = logging.getLogger("penstock.serving")


def tell(event: str, message: str, level: int = logging.INFO, **facts: Any) -> None:
    """Write a line of what happened to a model or a worker: ``event`` names it for machines, ``message`` for people."""
    LOG.log(level, message, extra={"facts": {"event": event, "message": message, **facts}})


class JsonLines(logging.Formatter):
    """``time`` (UTC), ``level``, then the record's ``facts`` where it has some, else its ``message``; ``trace``."""

    def format(self, record: logging.LogRecord) -> str:
        """One line."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {"time": time, "level": record.levelname.lower()}
        facts = getattr(record, "facts", None)
        line |= {"message": record.getMessage()} if facts is None else facts
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)
