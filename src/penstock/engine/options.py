"""The options of an engine, and those of a request except its sampling."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Final, TypedDict

from penstock.config import check_flag, check_integer, check_number
from penstock.errors import DeadlineError
from penstock.validation import optional_number, refusal, set_fields, wrong_type

__all__ = [
    "PRIORITY_S",
    "BeamSettings",
    "EngineFields",
    "EngineOptions",
    "RequestOptions",
    "check_options",
]

PRIORITY_S: Final = 10.0
MIXED_TOKENS: Final = 128
"""A processor computes 128 rows as fast per row as 512, and a decode in the step waits a quarter as long."""
MAX_PRIORITY: Final = 2**31 - 1
MAX_DEADLINE_S: Final = 1e9
MAX_SALT_CHARS: Final = 1024
MAX_CLIENT_CHARS: Final = 64
MAX_SESSION_CHARS: Final = 64
MAX_BEAMS: Final = 128
MAX_LENGTH_PENALTY: Final = 8


@dataclass(frozen=True)
class EngineOptions:
    """The options of an engine.

    ``max_chunk``: maximum number of a request's tokens in one step (0: the step's budget).
    ``max_mixed_tokens``: maximum number of prompt tokens in a step that also decodes, so that answers do not stall
    while a prompt is computed (0: what the decodes leave of the budget).  A step without decodes takes prompts up to
    its budget.
    ``prefix_cache``: requests share the pages of equal beginnings.  Without it only the ``n`` answers to one prompt do.
    ``max_waiting``: maximum number of requests that wait beyond the places of a step; another one is refused with
    QueueFullError (0: no limit).
    ``priority_s``: seconds of waiting that one level of priority is worth.
    """

    max_chunk: int = 0
    max_mixed_tokens: int = MIXED_TOKENS
    prefix_cache: bool = True
    max_waiting: int = 0
    priority_s: float = PRIORITY_S

    def __post_init__(self) -> None:
        """Check every field."""
        integers = ("max_chunk", "max_mixed_tokens", "max_waiting")
        set_fields(self, **{name: check_integer(name, getattr(self, name), 0, 2**31 - 1) for name in integers})
        check_flag("prefix_cache", self.prefix_cache)
        set_fields(self, priority_s=check_number("priority_s", self.priority_s, MAX_DEADLINE_S))


class EngineFields(TypedDict, total=False):
    """The fields of EngineOptions as keyword arguments."""

    max_chunk: int
    max_mixed_tokens: int
    prefix_cache: bool
    max_waiting: int
    priority_s: float


@dataclass(frozen=True)
class RequestOptions:
    """The options of a request.

    ``priority``: the lower number goes first, and may take the place of a higher one, which is then computed again
    later. A request that has waited the engine's ``priority_s`` longer for each level goes first nevertheless, so that
    a stream of urgent requests starves none.
    ``deadline_s``: seconds after which the request ends with DeadlineError in any state; None is no deadline.
    ``cache_salt``: only requests with the same salt share pages of equal beginnings.
    ``truncate_prompt``: keep the end of a prompt that is too long, so that ``max_tokens`` fit after it (or half the
    context, if that is less).  Without it such a prompt is refused.
    ``client``: the client that sent the request, at most 64 characters.  Within a priority clients have equal shares of
    the tokens, so that many requests of one client do not hold up the others.  The requests of one client go in order
    of arrival.
    ``session``: among workers where it costs the same, a request goes to the one that had the last request of its
    session.  At most 64 characters; "" is the client.  With one worker there is nothing to choose.
    """

    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    truncate_prompt: bool = False
    client: str = ""
    session: str = ""

    def __post_init__(self) -> None:
        """Check every field."""
        set_fields(
            self,
            priority=check_integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY),
            deadline_s=None if self.deadline_s is None else check_number("deadline_s", self.deadline_s, MAX_DEADLINE_S),
        )
        check_flag("truncate_prompt", self.truncate_prompt)
        limits = {"cache_salt": MAX_SALT_CHARS, "client": MAX_CLIENT_CHARS, "session": MAX_SESSION_CHARS}
        for name, limit in limits.items():
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > limit:
                raise refusal(name, f"a string of at most {limit} characters", value)

    def since(self, start: float) -> RequestOptions:
        """Return the options with what is left of the deadline, which began at ``start`` (``time.monotonic``).

        For the later parts of a request that runs as several.  Raises DeadlineError if nothing is left.
        """
        if self.deadline_s is None:
            return self
        left_s = self.deadline_s - (time.monotonic() - start)
        if left_s <= 0:
            message = f"deadline_s {self.deadline_s:g} has passed: a part of the request had not begun"
            raise DeadlineError(message, param="deadline_s")
        return replace(self, deadline_s=left_s)


@dataclass(frozen=True)
class BeamSettings:
    """The settings of a beam search.  With 1 beam there is no search.

    ``early_stopping``: True ends it when ``num_beams`` continuations are complete; False when no beam is likely to
    become better; "never" when none can.  ``length_penalty``: scores are divided by the length to this power.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        """Check every field."""
        early, limit = self.early_stopping, MAX_LENGTH_PENALTY
        if not isinstance(early, bool) and early != "never":
            raise refusal("early_stopping", "True, False or 'never'", early)
        penalty = optional_number("length_penalty", self.length_penalty, -limit, limit)
        set_fields(
            self,
            num_beams=check_integer("num_beams", self.num_beams, 1, MAX_BEAMS),
            length_penalty=1.0 if penalty is None else penalty,
        )


def check_options(options: object) -> RequestOptions:
    """Return a request's options, the defaults if None.  Raises InvalidArgumentError for another type."""
    if options is None:
        return RequestOptions()
    if not isinstance(options, RequestOptions):
        raise wrong_type("options", "RequestOptions", options)
    return options
