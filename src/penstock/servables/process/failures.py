"""Failures of the operator's code as messages that can be sent: any text, number or exception may occur here."""

from __future__ import annotations

import operator
import traceback
from typing import Final

from penstock.servables.api.declare import InputError
from penstock.servables.process import worker_messages_pb2 as pb

__all__ = ["InvalidResultError", "failure_of", "format_trace", "to_unicode"]

_MAX_NAME_CHARS: Final = 100
_MAX_TEXT_CHARS: Final = 500
_MAX_TRACE_CHARS: Final = 4000


class InvalidResultError(Exception):
    """Raised when a stage or model returns something other than its declared outputs."""


def to_unicode(text: str, max_chars: int) -> str:
    """Return the first ``max_chars`` characters; lone surrogates (from file names that are not UTF-8) are escaped as
    ``\\udcff``.
    """
    return text[:max_chars].encode("utf-8", "backslashreplace").decode()


def failure_of(error: Exception, stage: str, num_rows: int) -> pb.Failure:
    """Return the message for an exception that a stage raised.

    ``num_rows``: the number of instances in its batch without padding; 0 for a stage that takes one at a time.
    """
    if isinstance(error, InputError):
        instance = _instance_index(error.instance, num_rows)
        return pb.Failure(instance=instance, stage=stage, kind="input", text=_text(error))
    if isinstance(error, InvalidResultError):
        return pb.Failure(instance=-1, stage=stage, kind="result", text=_text(error))
    name = type(error).__name__[:_MAX_NAME_CHARS]
    return pb.Failure(instance=-1, stage=stage, kind="exception", text=name, trace=_full_trace(error))


def _instance_index(index: object, num_rows: int) -> int:
    """Convert an integer of any type; return -1 for anything that is not the index of a client's instance."""
    try:
        number = operator.index(index)  # type: ignore[arg-type]  # the operator's code may pass anything
    except Exception:
        return -1
    return number if 0 <= number < num_rows else -1


def _text(error: Exception) -> str:
    try:
        return to_unicode(str(error), _MAX_TEXT_CHARS)
    except Exception:
        return type(error).__name__[:_MAX_NAME_CHARS]


def format_trace(error: BaseException, file: str, runner: str) -> str:
    """Return the traceback of an error in ``file``, without the frames of ``runner``, the module that ran the file.

    A file that does not compile has no frames left; an error that was raised elsewhere keeps all of its frames.
    """
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    num_outer = frames.index(file) if file in frames else len(frames) if frames[-1:] == [runner] else 0
    trace = error.__traceback__
    for _ in range(num_outer):
        trace = trace and trace.tb_next
    return _full_trace(error.with_traceback(trace))


def _full_trace(error: BaseException) -> str:
    """Return the last characters of the formatted traceback."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = type(error).__name__
    return to_unicode(text[-_MAX_TRACE_CHARS:], _MAX_TRACE_CHARS)
