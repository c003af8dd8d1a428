"""The page of shared memory in which a servable worker records its progress.

The primary reads it to learn which stage and instance a process was running when it died or hung.
"""

from __future__ import annotations

import mmap
import struct
from typing import Final

__all__ = ["NO_STAGE", "PROGRESS_BYTES", "ProcessProgress"]

PROGRESS_BYTES: Final = mmap.PAGESIZE
_HAS_BEGUN: Final = struct.Struct("<I")
"""1 if the process has started to read the batch that it was sent last, 0 if not."""
_POSITION: Final = struct.Struct("<II")
"""The stage in its unit, and the instance in the batch counted from 1; 0 stands for all instances."""
NO_STAGE: Final = 0xFFFFFFFF
"""The stage of a process that has called none."""


class ProcessProgress:
    """The progress of one process, as both sides see it."""

    def __init__(self, shared_fd: int) -> None:
        self._memory: mmap.mmap | bytearray = mmap.mmap(shared_fd, PROGRESS_BYTES)
        self._is_closed = False
        self._last = False, (NO_STAGE, -1)

    def reset(self) -> bool:
        """Primary: clear the page before a batch is sent; False if the page is closed."""
        if self._is_closed:
            return False
        _HAS_BEGUN.pack_into(self._memory, 0, 0)
        _POSITION.pack_into(self._memory, _HAS_BEGUN.size, NO_STAGE, 0)
        return True

    def read(self) -> tuple[bool, tuple[int, int]]:
        """Primary: return whether the process has started to read its batch, and the stage and instance it is at.

        The instance is -1 for all instances.  A stage number that the unit does not have means: no stage was called.
        After ``close`` this returns the last state.
        """
        if not self._is_closed:
            (has_begun,) = _HAS_BEGUN.unpack_from(self._memory)
            stage, instance = _POSITION.unpack_from(self._memory, _HAS_BEGUN.size)
            self._last = bool(has_begun), (stage, instance - 1)
        return self._last

    def close(self) -> None:
        """Primary: unmap the page, which holds a file descriptor."""
        self.read()
        self._is_closed = True
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()

    def begin(self) -> None:
        """Servable worker: note that reading of a batch has started."""
        _HAS_BEGUN.pack_into(self._memory, 0, 1)

    def note(self, stage: int, instance: int) -> None:
        """Servable worker: note the stage that runs now, and the instance; -1 stands for all instances."""
        _POSITION.pack_into(self._memory, _HAS_BEGUN.size, stage, instance + 1)

    def detach(self) -> None:
        """Forked child of a servable worker: stop writing to the shared page."""
        self._memory = bytearray(PROGRESS_BYTES)
