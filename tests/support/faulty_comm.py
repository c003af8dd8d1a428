"""A comm whose functions a test replaces: with a fault, or to look at what ranks send."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from penstock.core.comm import SharedComm
from penstock.core.library import CommStruct

__all__ = ["FaultyComm"]


class FaultyComm:
    """The comm of a rank with some functions replaced, by name."""

    def __init__(self, comm: SharedComm, **functions: Callable[..., Any]) -> None:
        self._comm = comm
        self._struct = CommStruct.from_buffer_copy(comm.struct)
        self._kept = {}  # ctypes frees a callback with its object
        for name, function in functions.items():
            self._kept[name] = dict(CommStruct._fields_)[name](function)
            setattr(self._struct, name, self._kept[name])
        self.rank, self.world = comm.rank, comm.world
        self.abort, self.close = comm.abort, comm.close
        self.address = ctypes.addressof(self._struct)
