"""What operators' code raised, as messages can hold it: any text, any number and any exception may come here."""

from __future__ import annotations

import operator
import traceback
from typing import Final

from penstock.servables.api.declare import InputError
from penstock.servables.process import stages_pb2 as pb

__all__ = ["MisfitResultError", "failure_of", "plain", "trace_of"]

_MAX_NAME_CHARS: Final = 100
_MAX_TEXT_CHARS: Final = 500
_MAX_TRACE_CHARS: Final = 4000


class MisfitResultError(Exception):
    """What a stage returned is not what it declares."""


def plain(text: str, most: int) -> str:
    """The first ``most`` characters; what is no Unicode (file names that are not UTF-8 have such) as ``\\udcff``."""
    return text[:most].encode("utf-8", "backslashreplace").decode()


def failure_of(error: Exception, stage: str, num_rows: int) -> pb.Failure:
    """An exception of a stage that was given a batch of so many instances, padding not counted; 0: of a single one."""
    if isinstance(error, InputError):
        instance = _instance(error.instance, num_rows)
        return pb.Failure(instance=instance, stage=stage, kind="input", text=_text(error))
    if isinstance(error, MisfitResultError):
        return pb.Failure(instance=-1, stage=stage, kind="result", text=_text(error))
    name = type(error).__name__[:_MAX_NAME_CHARS]
    return pb.Failure(instance=-1, stage=stage, kind="exception", text=name, trace=_trace(error))


def _instance(given: object, num_rows: int) -> int:
    """A whole number of any kind; -1 for what names no instance that a client sent."""
    try:
        found = operator.index(given)  # type: ignore[arg-type]  # whatever they gave
    except Exception:
        return -1
    return found if 0 <= found < num_rows else -1


def _text(error: Exception) -> str:
    try:
        return plain(str(error), _MAX_TEXT_CHARS)
    except Exception:
        return type(error).__name__[:_MAX_NAME_CHARS]


def trace_of(error: BaseException, file: str, runner: str) -> str:
    """What a file raised while ``runner`` ran it, without the frames before its own: none for a file that cannot be
    compiled.  What was raised elsewhere keeps all.
    """
    frames = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    num_ours = frames.index(file) if file in frames else len(frames) if frames[-1:] == [runner] else 0
    trace = error.__traceback__
    for _ in range(num_ours):
        trace = trace and trace.tb_next
    return _trace(error.with_traceback(trace))


def _trace(error: BaseException) -> str:
    """The end of it."""
    try:
        text = "".join(traceback.format_exception(error))
    except Exception:
        text = type(error).__name__
    return plain(text[-_MAX_TRACE_CHARS:], _MAX_TRACE_CHARS)
