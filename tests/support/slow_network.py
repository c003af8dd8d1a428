"""A network script that takes its time, for tests that interrupt an export."""

from __future__ import annotations

from pathlib import Path

NETWORK = """
import time
from pathlib import Path
from penstock.models.decoders.llama import Config, Network
class Slow(Network):
    def __init__(self, config):
        print("a print in a network script")
        Path({started!r}).write_text("")
        time.sleep({seconds})
        super().__init__(config)
"""


def write_script(folder: Path, seconds: float) -> tuple[str, Path]:
    """A network script that notes that it runs, then takes its time."""
    started = folder / "started"
    script = folder / "net.py"
    script.write_text(NETWORK.format(started=str(started), seconds=seconds))
    return f"{script}:Slow", started
