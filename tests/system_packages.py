"""Programs that some tests run, and the Debian packages that contain them.

``python tests/system_packages.py`` installs the packages whose programs are missing, as root on a system with apt-get.
Elsewhere it prints the command that would, and the tests that need a missing program are skipped with the same command.
With ``--browser`` it looks for the browser of the page's tests, and for no other program.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys

PACKAGES = {
    "flatc": "flatbuffers-compiler",
    "pkg-config": "pkg-config",
    "openssl": "openssl",
    "curl": "curl",
    "mpirun.openmpi": "openmpi-bin",  # starts ranks; those over MPI use MPICH, from its wheel
}
# 60 MB: the core built for AArch64 and run under emulation.  A machine of that architecture needs neither.
AARCH64 = {"aarch64-linux-gnu-g++": "g++-aarch64-linux-gnu", "qemu-aarch64": "qemu-user"}
BROWSER = {"chromium": "chromium fonts-dejavu-core"}


def missing_packages(programs: dict[str, str]) -> list[str]:
    """Return the packages of the programs that are not on PATH, each once."""
    missing = " ".join(package for program, package in programs.items() if shutil.which(program) is None)
    return list(dict.fromkeys(missing.split()))


def install_command(packages: list[str]) -> str:
    """Return the shell command that a user without root would run."""
    return f"sudo apt-get install {' '.join(packages)}"


def skip_reason(*programs: str) -> str:
    """Return why a test that runs these programs is skipped, with the command that changes it; "" if all are there."""
    known = {**PACKAGES, **AARCH64, **BROWSER}
    missing = [program for program in programs if shutil.which(program) is None]
    packages = missing_packages({program: known[program] for program in missing})
    return f"{', '.join(missing)} not found; run: {install_command(packages)}" if missing else ""


def install(packages: list[str]) -> bool:
    """Install packages with apt-get, quietly; return False if that failed, after its output was printed."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
        done = subprocess.run(
            ["apt-get", "--quiet", *words], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            print(done.stdout + done.stderr, file=sys.stderr)
            return False
    return True


def main() -> None:
    wanted = {**PACKAGES, **(AARCH64 if platform.machine() == "x86_64" else {})}
    if "--browser" in sys.argv[1:]:
        wanted = BROWSER
    packages = missing_packages(wanted)
    if not packages:
        return
    if os.geteuid() == 0 and shutil.which("apt-get"):
        print(f"Installing system packages that tests need: {' '.join(packages)}", flush=True)
        if install(packages):
            return
    print(f"Some tests will be skipped. To run them: {install_command(packages)}", flush=True)


if __name__ == "__main__":
    main()
