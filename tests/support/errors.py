"""Errors of Penstock, matched by class, ``param`` and ``code`` instead of by their sentence."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

_ANY: Any = object()


@contextmanager
def raises(
    error: type[BaseException] | tuple[type[BaseException], ...],
    *,
    param: str | None = _ANY,
    code: str | None = _ANY,
    match: str | None = None,
) -> Iterator[pytest.ExceptionInfo[Any]]:
    """Like ``pytest.raises``, for an error with this ``param`` and ``code``.

    ``param``: the field; the name of a list also matches the error of one of its elements (``ids[0]``).
    ``match``: a regular expression for the fact that tells this error from others with the same field: a value, a name
    or a path.
    """
    with pytest.raises(error, match=match) as caught:
        yield caught
    actual = caught.value
    if param is not _ANY:
        list_name = (getattr(actual, "param", None) or "").partition("[")[0]
        assert param in (getattr(actual, "param", None), list_name), f"param {actual.param!r}: {actual}"
    if code is not _ANY:
        assert actual.code == code, f"code {actual.code!r}: {actual}"
