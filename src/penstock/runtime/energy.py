"""The energy that the processors used, where the kernel counts it (RAPL, by the powercap interface)."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["EnergyMeter"]

_POWERCAP: Final = Path("/sys/class/powercap")


class EnergyMeter:
    """Counts the joules of all processors from its creation on, with those of other programs.

    A zone is a processor ("package-0") or the whole machine ("psys"); zones inside a zone are not counted twice.
    """

    def __init__(self, folder: Path = _POWERCAP) -> None:
        """Read the counters; ``folder`` has the zones."""
        self._zones: dict[Path, tuple[int, int]] = {}
        for zone in sorted(folder.glob("intel-rapl:*")) if folder.is_dir() else ():
            name, now = _text(zone / "name"), _number(zone / "energy_uj")
            if zone.name.count(":") == 1 and name.startswith("package") and now is not None:
                self._zones[zone] = now, _number(zone / "max_energy_range_uj") or 0

    def joules(self) -> float | None:
        """Return the joules since the creation; None where nothing is counted or the counters are not readable.

        A counter that began again at 0 has passed its range once.
        """
        total = 0
        for zone, (begin, limit) in self._zones.items():
            now = _number(zone / "energy_uj")
            if now is None or (now < begin and not limit):
                return None
            total += now - begin if now >= begin else now + limit - begin
        return total / 1e6 if self._zones else None


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # absent, or for root only
        return ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdecimal() else None
