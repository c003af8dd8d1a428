"""Tokenizer calls that must not hold an event loop: long texts, and tokenizers that run in another process."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

if TYPE_CHECKING:
    from penstock.text.tokenizer import Tokenizer

__all__ = ["call_isolated", "call_tokenizer"]

_LONG_TEXT: Final = 2000
"""A text of this many characters or tokens is processed outside the event loop."""
_LONG_CALLS: Final = ThreadPoolExecutor(2, "penstock-text")
"""A separate pool, so that long texts do not delay chat templates."""
_isolated_calls: Final[WeakKeyDictionary[Tokenizer, ThreadPoolExecutor]] = WeakKeyDictionary()


async def call_tokenizer(tokenizer: Tokenizer, num_items: int, call: Any, *arguments: Any, **named: Any) -> Any:
    """Return ``call(*arguments, **named)``, which uses ``tokenizer`` on ``num_items`` characters or tokens.

    A short call runs in the event loop, a long one in one of two threads.  A tokenizer in another process may be slow
    or exit, so it has a separate thread: requests for other models never wait for it.
    """
    if tokenizer.is_isolated:
        pool = _isolated_calls.get(tokenizer)
        if pool is None:
            pool = _isolated_calls[tokenizer] = ThreadPoolExecutor(1, "penstock-tokenizer")
    elif num_items < _LONG_TEXT:
        return call(*arguments, **named)
    else:
        pool = _LONG_CALLS
    return await asyncio.get_running_loop().run_in_executor(pool, partial(call, *arguments, **named))


async def call_isolated(isolated: Tokenizer | None, call: Any, *arguments: Any) -> Any:
    """Return ``call(*arguments)``, run in the thread of ``isolated`` if the tokenizer runs in another process."""
    return call(*arguments) if isolated is None else await call_tokenizer(isolated, 0, call, *arguments)
