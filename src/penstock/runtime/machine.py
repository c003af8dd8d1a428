"""The resources that this process may use, as the kernel and the cgroup report them: memory, cores, huge pages."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = [
    "Memory", "OomKills", "affinity", "cgroup_cpus", "huge_pages", "memory", "num_oom_kills", "peak_rss_bytes",
    "reset_peak_rss",
]  # fmt: skip

_CGROUP = Path("/sys/fs/cgroup")
_SHORTAGE_S: Final = 10.0
"""Kills for lack of memory within this time are of one shortage."""


@dataclass(frozen=True)
class Memory:
    """The memory of the machine in bytes: available without swapping, total, and the cgroup's limit (None: no limit).

    Without /proc the memory that other processes use is unknown: ``available`` is then the whole memory of the machine
    or the cgroup, and ``is_measured`` is False.  ``available`` and ``total`` are 0 when even that is unknown.
    """

    available: int
    total: int
    cgroup_limit: int | None
    is_measured: bool = True


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _fields(path: Path) -> dict[str, int]:
    """Return the values of lines "name value" and "name: value kB", in bytes, by name."""
    values = {}
    for line in _read(path).splitlines():
        words = line.replace(":", " ").split()
        if len(words) >= 2 and words[1].isdigit():
            values[words[0]] = int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return values


def _own_cgroups(controller: str) -> Iterator[Path]:
    """Yield this process's folder in the cgroup hierarchy and those above it; version 2 first, then version 1."""
    lines = _read(Path("/proc/self/cgroup")).splitlines()
    if not lines:  # without /proc, in a container, the root of the hierarchy is its own group
        yield from (_CGROUP, _CGROUP / controller)
    for line in lines:
        number, _, fields = line.partition(":")
        controllers, _, path = fields.partition(":")
        if number == "0":
            root = _CGROUP
        elif controller in controllers.split(","):
            root = _CGROUP / controller
        else:
            continue
        folder = root / path.lstrip("/")
        if not folder.is_dir():
            folder = root  # in a container its own folder is the root
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent


def memory() -> Memory:
    """Return the memory that this process may still use."""
    info = _fields(Path("/proc/meminfo"))
    total = info.get("MemTotal", 0) or _physical_bytes()
    available = info.get("MemAvailable", total)
    limit: int | None = None
    for folder in _own_cgroups("memory"):
        max_bytes = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if max_bytes is None or max_bytes >= total > 0:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        stat = _fields(folder / "memory.stat")
        reclaimable = stat.get("inactive_file", 0) + stat.get("active_file", 0)
        available = min(available, max(0, max_bytes - used + reclaimable))
        limit = max_bytes if limit is None else min(limit, max_bytes)
    return Memory(available, total, limit, "MemTotal" in info)


def num_oom_kills() -> int:
    """Return how many processes the kernel has killed for lack of memory: in this process's cgroup, or on the machine.

    It is 0 if the kernel does not say.
    """
    for folder in _own_cgroups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            if (count := _fields(folder / name).get("oom_kill")) is not None:
                return count
    return _fields(Path("/proc/vmstat")).get("oom_kill", 0)


class OomKills:
    """Tells whether the kernel has killed a process of this service for lack of memory since the last look.

    A shortage can end several processes, so each kill counts for one look.  Those that no look asked for within seconds
    were of other programs.
    """

    def __init__(self) -> None:
        self._count = num_oom_kills()
        self._num_left = 0
        self._end = 0.0

    def look(self) -> bool:
        """Return True if there was one that no earlier call has counted."""
        before, self._count = self._count, num_oom_kills()
        now = time.monotonic()
        if now > self._end:
            self._num_left = 0
        if self._count > before:
            self._num_left += self._count - before
            self._end = now + _SHORTAGE_S
        if not self._num_left:
            return False
        self._num_left -= 1
        return True


def _physical_bytes() -> int:
    """Return the machine's memory from the C library, which needs no /proc; 0 when it is unknown."""
    try:
        return max(0, os.sysconf("SC_PHYS_PAGES")) * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


def cgroup_cpus() -> float | None:
    """Return the number of cores that the cgroup allows, as a float; None without a limit."""
    cpus: list[float] = []
    for folder in _own_cgroups("cpu"):
        quota, _, period = _read(folder / "cpu.max").strip().partition(" ")
        if quota.isdigit() and period.isdigit():
            cpus.append(int(quota) / int(period))
        old_quota, old_period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if old_quota and old_period:
            cpus.append(old_quota / old_period)
    return min(cpus) if cpus else None


def huge_pages() -> str:
    """Return the setting of transparent huge pages: "always", "madvise", "never" or "unknown"."""
    text = _read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    return text.partition("[")[2].partition("]")[0] or "unknown"


def peak_rss_bytes(others: Iterable[int] = ()) -> int:
    """Return the peak resident memory in bytes of this process, and of ``others`` by process id.

    getrusage is used only without /proc, because its value survives exec and may be that of the parent process.
    """
    own = _fields(Path("/proc/self/status")).get("VmHWM", 0)
    own = own or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
    return own + sum(_fields(Path(f"/proc/{pid}/status")).get("VmHWM", 0) for pid in others)


def reset_peak_rss() -> None:
    """Reset the peak of ``peak_rss_bytes``, if the kernel permits it."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def affinity() -> list[int]:
    """Return the numbers of the cores that this process may run on."""
    return sorted(os.sched_getaffinity(0))
