"""The cost of a step: the seconds of decode steps by batch, and of prefill per token.

``penstock bench --costs`` measures a model on this machine and writes them; the simulator reads them.
"""

from __future__ import annotations

import bisect
import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.cluster.routing import Figures
from penstock.config import is_integer, is_number, show
from penstock.errors import FileAccessError, InvalidArgumentError, InvalidFileError

__all__ = ["COSTS_348M", "StepCosts", "read_costs", "write_costs"]

_REQUIRED: Final = ("model", "machine", "source", "tp", "prefill_token_s", "decode_step_s", "exchange_s")
_OPTIONAL: Final = ("prefill_step_s", "prefill_context_s", "decode_context_s", "request_s")
_FIELDS: Final = (*_REQUIRED, *_OPTIONAL)
_MAX_S: Final = 1e6
_MAX_BATCH: Final = 65_536


@dataclass(frozen=True)
class StepCosts:
    """Seconds of the steps of a replica.

    ``decode_step_s``: of a decode step by batch; other batches lie on the lines between, and on the last line beyond.
    ``decode_context_s``: in a decode step, per token that the requests have before it.  ``prefill_token_s``: per token
    of a prompt.  ``prefill_step_s``: of a step that has only prompt tokens.  ``prefill_context_s``: per token of a
    prompt and token before it.  ``request_s``: that a request adds once, besides its tokens, to the step that computes
    its first token; ``prefill_step_s`` includes that of one request.  ``tp``: the ranks that they were measured with.
    ``exchange_s``: of the exchanges in a step between tensor parallel ranks; used only for another number of ranks.
    ``model``, ``machine`` and ``source`` say what was measured.
    """

    model: str
    machine: str
    source: str
    prefill_token_s: float
    decode_step_s: dict[int, float]
    tp: int = 1
    exchange_s: float = 0.0
    prefill_step_s: float = 0.0
    prefill_context_s: float = 0.0
    decode_context_s: float = 0.0
    request_s: float = 0.0

    def decode_s(self, batch: int) -> float:
        """Return the seconds of a decode step of ``batch`` requests, at least 1."""
        batches = sorted(self.decode_step_s)
        if len(batches) == 1:
            return self.decode_step_s[batches[0]]
        high = min(max(1, bisect.bisect_left(batches, batch)), len(batches) - 1)
        low_batch, high_batch = batches[high - 1], batches[high]
        low_s, high_s = self.decode_step_s[low_batch], self.decode_step_s[high_batch]
        seconds = low_s + (high_s - low_s) * (batch - low_batch) / (high_batch - low_batch)
        return max(seconds, min(self.decode_step_s.values()))

    def on_ranks(self, tp: int) -> StepCosts:
        """Return an estimate for ``tp`` ranks: the work divided by the ranks, and the exchanges of a step.

        For the number of ranks that was measured these are the measured costs.
        """
        if not 1 <= tp <= 64:
            raise InvalidArgumentError(f"tp: expected an integer from 1 to 64, got {tp}", param="tp")
        if tp == self.tp:
            return self
        share, exchange_s = self.tp / tp, self.exchange_s if tp > 1 else 0.0
        decode = {batch: seconds * share + exchange_s for batch, seconds in self.decode_step_s.items()}
        shared = {
            name: getattr(self, name) * share for name in ("prefill_token_s", "prefill_context_s", "decode_context_s")
        }
        return replace(
            self,
            **shared,
            source=f"{self.source}; estimated for {tp} ranks",
            decode_step_s=decode,
            prefill_step_s=self.prefill_step_s * share + exchange_s,
            tp=tp,
        )

    def figures(self, max_requests: int) -> Figures:
        """Return what a router needs: the line from a batch of 1 to ``max_requests``, in short contexts."""
        first_s, last_s = self.decode_s(1), self.decode_s(max_requests)
        row_s = max(0.0, last_s - first_s) / max(1, max_requests - 1)
        return Figures(self.prefill_token_s, max(0.0, first_s - row_s), row_s)


COSTS_348M: Final = StepCosts(
    model="348M w8a8",
    machine="two cores of Zen 4",
    source="docs/history/performance.md, beside other engines, Zen 4: 96, 563 and 1,243 tokens/s at batch 1, 8 and 32; "
    "prefill 3,645 tokens/s",
    prefill_token_s=1 / 3645,
    decode_step_s={1: 1 / 96, 8: 8 / 563, 32: 32 / 1243},
    exchange_s=24 * 4 * 2.8e-6,
)
"""The costs that are used without a file.  The exchanges are 4 for each of 24 layers, at the median of 16 KB."""


def read_costs(path: Path) -> StepCosts:
    """Return the costs in a file that ``write_costs`` wrote.

    Raises FileAccessError if it cannot be read, and InvalidFileError that names the field for any other content.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise InvalidFileError(f"{path}: expected text in UTF-8") from None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidFileError(f"{path}: expected one JSON object: {error}") from None
    if not isinstance(fields, dict):
        raise InvalidFileError(f"{path}: expected one JSON object, got {show(fields)}")
    for name in fields:
        if name not in _FIELDS:
            raise InvalidFileError(f"{path}: {show(name)}: expected one of {', '.join(_FIELDS)}", param=str(name))
    for name in _REQUIRED:
        if name not in fields:
            raise InvalidFileError(f"{path}: {name}: expected a value, got none", param=name)
    _check(path, fields)
    decode = {int(batch): float(seconds) for batch, seconds in fields.pop("decode_step_s").items()}
    return StepCosts(decode_step_s=decode, **fields)


def _check(path: Path, fields: dict[str, Any]) -> None:
    def refuse(name: str, expected: str, actual: object) -> InvalidFileError:
        return InvalidFileError(f"{path}: {name}: expected {expected}, got {show(actual)}", param=name.split(".")[0])

    for name in ("model", "machine", "source"):
        if not isinstance(fields[name], str):
            raise refuse(name, "a string", fields[name])
    if not is_integer(fields["tp"], 1, 64):
        raise refuse("tp", "an integer from 1 to 64", fields["tp"])
    for name in ("exchange_s", *_OPTIONAL):
        if not is_number(fields.get(name, 0.0), 0, _MAX_S):
            raise refuse(name, "a number of seconds", fields[name])
    if not _is_time(fields["prefill_token_s"]):
        raise refuse("prefill_token_s", "a number of seconds above 0", fields["prefill_token_s"])
    steps = fields["decode_step_s"]
    if not isinstance(steps, dict) or not steps:
        raise refuse("decode_step_s", "an object with seconds by batch", steps)
    for batch, seconds in steps.items():
        if not (batch.isascii() and batch.isdigit() and 1 <= int(batch[:9]) <= _MAX_BATCH):
            raise refuse("decode_step_s", f"batches from 1 to {_MAX_BATCH}", batch)
        if not _is_time(seconds):
            raise refuse(f"decode_step_s.{batch}", "a number of seconds above 0", seconds)


def _is_time(value: object) -> bool:
    return is_number(value, 0, _MAX_S) and isinstance(value, int | float) and value > 0 and math.isfinite(value)


def write_costs(costs: StepCosts, path: Path) -> None:
    """Write costs as a file that ``read_costs`` reads; FileAccessError."""
    fields = {name: getattr(costs, name) for name in _FIELDS}
    try:
        path.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise FileAccessError(f"{path}: {error.strerror or error}") from None
