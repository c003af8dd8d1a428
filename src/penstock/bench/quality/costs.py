"""The cost of schemes in perplexity, from reports of ``penstock eval --json``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.bench.quality.texts import read_bytes
from penstock.config import is_number, parse_json, show
from penstock.errors import InvalidFileError

__all__ = ["read_costs"]


def read_costs(paths: Iterable[Path | str]) -> dict[str, float]:
    """Return the increase of the perplexity by scheme, as a share: of MODEL against OTHER in each report.

    OTHER itself costs nothing.  Raises FileAccessError and InvalidFileError with the parameter ``quality``, also for
    reports that compare with different schemes.
    """
    costs: dict[str, float] = {}
    reference = None
    for path in paths:
        report = _read(Path(path))
        try:
            scheme, other = report["model"]["scheme"], report["against"]["scheme"]
            change = report["divergence"]["nll_change"]["value"]
        except (KeyError, TypeError):
            raise _refusal(path, "a report of `penstock eval --against OTHER --json`", "another object") from None
        if not isinstance(scheme, str) or not isinstance(other, str) or not is_number(change, -100, 100):
            raise _refusal(path, "schemes and a change of the perplexity", show([scheme, other, change]))
        if reference not in (None, other):
            raise _refusal(path, f"a comparison with {reference}, as in the other reports", show(other))
        reference = other
        costs |= {scheme: math.expm1(change), other: 0.0}
    return costs


def _read(path: Path) -> dict[str, Any]:
    data = read_bytes("quality", path)
    try:
        value = parse_json(data, str(path), max_bytes=len(data) + 1, lenient=True)
    except InvalidFileError as error:
        raise InvalidFileError(f"quality: {error}", param="quality", code="invalid_json") from None
    if not isinstance(value, dict):
        raise _refusal(path, "an object", type(value).__name__)
    return value


def _refusal(path: Path | str, expected: str, actual: str) -> InvalidFileError:
    return InvalidFileError(
        f"quality: {path}: expected {expected}, got {actual}", param="quality", code="invalid_report"
    )
