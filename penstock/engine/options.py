"""Options of an engine and of one request in it, beside how its tokens are sampled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

from penstock.errors import InvalidArgumentError

__all__ = ["PRIORITY_S", "EngineFields", "EngineOptions", "RequestOptions"]

PRIORITY_S: Final = 10.0
MAX_PRIORITY: Final = 2**31 - 1
MAX_DEADLINE_S: Final = 1e9
MAX_SALT_CHARS: Final = 1024


def _check_whole(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidArgumentError(f"{name} must be a whole number from {low} to {high}, not {value!r}")


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} must be True or False, not {value!r}")


@dataclass(frozen=True)
class EngineOptions:
    """How an engine serves its requests.

    ``max_chunk`` bounds the tokens of one request in one step (0: the step's budget).  ``prefix_cache``: requests
    share the pages of equal beginnings.  ``max_waiting``: a request that finds so many waiting is refused with
    QueueFullError; 0 lets any number wait.  ``priority_s``: seconds of waiting that a level of priority is worth.
    """

    max_chunk: int = 0
    prefix_cache: bool = True
    max_waiting: int = 0
    priority_s: float = PRIORITY_S

    def __post_init__(self) -> None:
        """Refuse what no engine could do."""
        _check_whole("max_chunk", self.max_chunk, 0, 2**31 - 1)
        _check_flag("prefix_cache", self.prefix_cache)
        _check_whole("max_waiting", self.max_waiting, 0, 2**31 - 1)
        worth = self.priority_s
        if isinstance(worth, bool) or not isinstance(worth, (int, float)) or not 0 < worth <= MAX_DEADLINE_S:
            raise InvalidArgumentError(f"priority_s must be seconds above 0 and up to 1e9, not {worth!r}")


class EngineFields(TypedDict, total=False):
    """The fields of EngineOptions as keyword arguments."""

    max_chunk: int
    prefix_cache: bool
    max_waiting: int
    priority_s: float


@dataclass(frozen=True)
class RequestOptions:
    """How a request is served.

    ``priority``: the lower number goes first and may take the place of a higher one, which is then computed again
    later; requests of one priority go in order of arrival.  One that has waited the engine's ``priority_s`` longer for
    each level goes first all the same, so that no stream of urgent requests starves it.  ``deadline_s``: seconds after
    which the request ends with DeadlineError wherever it stands; None waits for ever.  ``cache_salt``: only requests of
    the same salt share pages of equal beginnings.  ``truncate_prompt``: of a prompt that is too long keep the end, so
    that ``max_tokens`` fit behind it (or half the context, when they are more); without it such a prompt is refused.
    """

    priority: int = 0
    deadline_s: float | None = None
    cache_salt: str = ""
    truncate_prompt: bool = False

    def __post_init__(self) -> None:
        """Refuse a field that is out of range, by name."""
        _check_whole("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        deadline = self.deadline_s
        if deadline is not None and (
            isinstance(deadline, bool) or not isinstance(deadline, (int, float)) or not 0 < deadline <= MAX_DEADLINE_S
        ):
            raise InvalidArgumentError(f"deadline_s must be seconds above 0 and up to 1e9, or None, not {deadline!r}")
        if not isinstance(self.cache_salt, str) or len(self.cache_salt) > MAX_SALT_CHARS:
            raise InvalidArgumentError(
                f"cache_salt must be a text of at most {MAX_SALT_CHARS} characters, not {self.cache_salt!r:.60}"
            )
        _check_flag("truncate_prompt", self.truncate_prompt)
