"""State of the whole process that a command changes while it runs: signal handlers, logging, environment, limits."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

__all__ = ["ignored_hangup", "kept_signals", "service_log", "service_state"]


@contextmanager
def kept_signals(*numbers: signal.Signals) -> Iterator[None]:
    """Restore the handlers of these signals at the end of the block."""
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: not one of Python
                signal.signal(number, handler)


@contextmanager
def ignored_hangup() -> Iterator[None]:
    """Ignore SIGHUP during the block, until something handles it."""
    with kept_signals(signal.SIGHUP):
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        yield


@contextmanager
def service_log(level: int | str, formatter: logging.Formatter) -> Iterator[None]:
    """Write records and warnings to the standard error during the block, unless logging is set up already."""
    root, uvicorn, shown = logging.getLogger(), logging.getLogger("uvicorn"), warnings.showwarning
    levels = [(logger, logger.level) for logger in (root, uvicorn)]
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=[handler])
    logging.captureWarnings(True)
    captures = warnings.showwarning is not shown
    uvicorn.setLevel(logging.WARNING)
    try:
        yield
    finally:
        if captures:
            logging.captureWarnings(False)
        root.removeHandler(handler)
        for logger, before in levels:
            logger.setLevel(before)


@contextmanager
def _quiet_grpc() -> Iterator[None]:
    """Keep gRPC's own lines out of the log during the block, unless the user has set its verbosity."""
    name = "GRPC_VERBOSITY"
    is_set = name in os.environ
    os.environ.setdefault(name, "NONE")
    try:
        yield
    finally:
        if not is_set:
            os.environ.pop(name, None)


@contextmanager
def _kept_limit() -> Iterator[None]:
    """Restore the limit on open files, which a service raises, at the end of the block."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def _thawed_objects() -> Iterator[None]:
    """Let the garbage collector look again, after the block, at the objects that a service froze."""
    num_frozen = gc.get_freeze_count()
    try:
        yield
    finally:
        if not num_frozen:
            gc.unfreeze()


@contextmanager
def service_state(level: int | str, formatter: logging.Formatter) -> Iterator[None]:
    """Set the process up for a service during the block, and restore its state at the end."""
    with ExitStack() as stack:
        for state in (ignored_hangup(), _quiet_grpc(), _kept_limit(), _thawed_objects()):
            stack.enter_context(state)
        stack.enter_context(service_log(level, formatter))
        yield
