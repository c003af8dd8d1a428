"""Errors of Penstock, matched by class, ``param`` and ``code`` instead of by their sentence."""

from __future__ import annotations

from types import TracebackType
from typing import Any

import pytest

_ANY: Any = object()


class raises:  # noqa: N801 - it is used like pytest.raises
    """Like ``pytest.raises``, for an error with this ``param`` and ``code``.

    ``param``: the field; the name of a list also matches the error of one of its elements (``ids[0]``).
    ``match``: a regular expression for the fact that tells this error from others with the same field: a value, a name
    or a path.
    """

    def __init__(
        self,
        error: type[BaseException] | tuple[type[BaseException], ...],
        *,
        param: str | None = _ANY,
        code: str | None = _ANY,
        match: str | None = None,
    ) -> None:
        self._raises: Any = pytest.raises(error, match=match)
        self._param, self._code = param, code

    def __enter__(self) -> pytest.ExceptionInfo[Any]:
        caught: pytest.ExceptionInfo[Any] = self._raises.__enter__()
        return caught

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        is_expected = bool(self._raises.__exit__(kind, error, trace))
        if is_expected and self._param is not _ANY:
            param = getattr(error, "param", None)
            assert self._param in (param, (param or "").partition("[")[0]), f"param {param!r}: {error}"
        if is_expected and self._code is not _ANY:
            assert getattr(error, "code", None) == self._code, f"code {getattr(error, 'code', None)!r}: {error}"
        return is_expected
