"""The example that starts workers for prefill and decode, and serves when all are up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.support.ports import free_port

ROOT = Path(__file__).parents[2]


def test_agents_start_and_answer() -> None:
    port = free_port()
    command = [sys.executable, str(ROOT / "examples" / "start_agents.py"), str(ROOT / "demo" / "demo.psm")]
    command += ["--port", str(port), "--prompt", "def add(a, b):\n    return"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    started = sorted(line for line in lines if line.endswith(": started"))
    assert started == ["agent demo-1, prefill: started", "agent demo-2, decode: started"]
    assert lines.index("all agents started") < len(lines) - 1, "an answer follows"
