"""Limits of memory and cores are read as the kernel writes them, in both versions of control groups."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.core.native import Context, Model
from penstock.runtime import machine, native
from penstock.runtime.program import ProgramLimits, pages_for
from tests.support.command import DEMO

GIB = 1 << 30
PROC = {
    "/proc/meminfo": f"MemTotal: {32 * GIB >> 10} kB\nMemFree: 1 kB\nMemAvailable: {20 * GIB >> 10} kB\n",
    "/proc/self/cgroup": "0::/user/job\n",
}


@pytest.fixture
def files(monkeypatch, tmp_path):
    """The kernel's files as a dictionary; control groups lie under a folder of the test's own."""
    found = dict(PROC)
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    real = machine._read
    monkeypatch.setattr(machine, "_read", lambda path: found.get(str(path)) or real(path))
    for folder in ("user/job", "memory/old", "cpu,cpuacct"):
        (tmp_path / folder).mkdir(parents=True)

    def write(name: str, text: str) -> None:
        found[name if name.startswith("/") else str(Path(tmp_path) / name)] = text

    return write


def test_without_a_limit_the_machine_counts(files):
    assert machine.memory() == machine.Memory(20 * GIB, 32 * GIB, None)
    assert machine.cgroup_cpus() is None
    files("user/job/memory.max", "max\n")
    files("user/job/cpu.max", "max 100000\n")
    assert machine.memory().cgroup_limit is None
    assert machine.cgroup_cpus() is None


def test_the_tightest_limit_on_the_way_up_counts(files):
    files("user/job/memory.max", f"{8 * GIB}\n")
    files("user/memory.max", f"{4 * GIB}\n")
    files("user/memory.current", f"{3 * GIB}\n")
    files("user/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 0\n")
    assert machine.memory() == machine.Memory(2 * GIB, 32 * GIB, 4 * GIB)
    files("user/job/cpu.max", "150000 100000\n")
    files("user/cpu.max", "400000 100000\n")
    assert machine.cgroup_cpus() == 1.5


def test_version_1_limits_are_read(files):
    files("/proc/self/cgroup", "4:memory:/old\n2:cpu,cpuacct:/gone\n")
    files("memory/old/memory.limit_in_bytes", f"{GIB}\n")
    files("memory/old/memory.usage_in_bytes", f"{GIB // 4}\n")
    assert machine.memory().available == GIB - GIB // 4
    assert machine.memory().cgroup_limit == GIB


def test_missing_kernel_files_are_tolerated(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_read", lambda _path: "")
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    assert machine.memory() == machine.Memory(sysconf_bytes(), sysconf_bytes(), None, is_measured=False)
    assert machine.cgroup_cpus() is None
    assert machine.huge_pages() == "unknown"


def test_peak_memory_excludes_other_processes():
    assert machine.peak_rss_bytes() > 10 << 20
    data = bytearray(64 << 20)
    high = machine.peak_rss_bytes()
    data[:] = b"x" * len(data)
    assert machine.peak_rss_bytes() >= high
    assert machine.affinity()


def sysconf_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_without_proc_the_limit_of_the_container_counts(monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "_CGROUP", tmp_path)
    monkeypatch.setattr(machine, "_read", lambda path: "" if str(path).startswith("/proc") else path.read_text())
    monkeypatch.setattr(machine, "_number", lambda path: {"memory.max": GIB, "memory.current": GIB // 4}.get(path.name))
    monkeypatch.setattr(machine, "_fields", lambda _path: {})
    assert machine.memory() == machine.Memory(GIB - GIB // 4, sysconf_bytes(), GIB, is_measured=False)


def test_unknown_memory_plans_one_context(monkeypatch):
    monkeypatch.setattr(native, "memory", lambda: machine.Memory(0, 0, None, is_measured=False))
    with Context(1) as context, Model.open(DEMO) as model:
        limits, _ = native.fit_limits(model, context, ProgramLimits(max_requests=4))
        assert limits.num_pages == pages_for(model.info.context_len)
        assert native.fit_limits(model, context, ProgramLimits(num_pages=5))[0].num_pages == 5


def test_run_goes_on_without_proc():
    script = (
        "import sys; from penstock.runtime import machine; real = machine._read; "
        "machine._read = lambda path: '' if str(path).startswith('/proc') else real(path); "
        "from penstock.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-P", "-c", script, "run", str(DEMO), "import", "--max-tokens", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "The free memory is unknown because /proc is not mounted." in done.stderr
    assert "memory 0 B" not in done.stderr
