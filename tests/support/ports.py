"""Ports for programs that are told theirs: no other worker of the tests, and no connection of the system, takes them.

A port that the system chose and that was given back may be another program's a moment later.  These are below the range
from which Linux chooses.
"""

from __future__ import annotations

import os
import socket
from itertools import cycle

_FIRST, _PER_WORKER, NUM_WORKERS = 24_000, 2_000, 4
WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % NUM_WORKERS
_offset = os.getpid() % _PER_WORKER  # of two runs at once
_ports = cycle(_FIRST + WORKER * _PER_WORKER + (_offset + number) % _PER_WORKER for number in range(_PER_WORKER))


def free_port() -> int:
    """Return a port of 127.0.0.1 at which nothing listens."""
    for port in _ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError
