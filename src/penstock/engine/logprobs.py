"""The log-probability of a token, read from a row that a program sampled or scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.core.arrays import ROW_NOT_FINITE, ROW_OK
from penstock.errors import InternalError, InvalidArgumentError

if TYPE_CHECKING:
    from penstock.core.arrays import Sampled

__all__ = ["TokenLogprobs", "check_row", "row_logprobs"]


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a token under the model's own distribution, before temperature, bias or penalty.

    ``rank`` is 1 for the likeliest token.  ``top`` holds pairs of token id and log-probability, likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


def row_logprobs(rows: Sampled, row: int, num_top: int) -> TokenLogprobs:
    """Return the log-probability of a row's token and of its ``num_top`` likeliest tokens."""
    top = zip(rows.top_ids[row, :num_top].tolist(), rows.top_logprobs[row, :num_top].tolist(), strict=True)
    return TokenLogprobs(int(rows.ids[row]), float(rows.logprobs[row]), int(rows.ranks[row]), tuple(top))


def check_row(rows: Sampled, row: int) -> None:
    """Raise if a row has no token: InternalError, or InvalidArgumentError if every token is forbidden."""
    status = int(rows.status[row])
    if status == ROW_NOT_FINITE:
        raise InternalError("The model's logits are not finite: its weights or its keys and values are damaged.")
    if status != ROW_OK:
        raise InvalidArgumentError(
            "No token can be sampled: bad_words, logit_bias, allowed_token_ids and the grammar together forbid every "
            "token.",
            code="no_token_allowed",
        )
