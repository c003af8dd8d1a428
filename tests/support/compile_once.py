"""A compiler launcher for CMake: an object that a build of this run made before is copied.

Tests build the core many times, as releases, clones, examples and other levels, and most of the files are then compiled
from the same text with the same options.  The object's name in the folder ``PENSTOCK_TEST_OBJECTS`` is the hash of both
and of the compiler.  What is compiled with debug information or sanitizers, which keep paths and lines, is shared only
where these are the same too.  Anything but the compilation of one C++ file is passed on as it is.

CMake calls ``compile_once.py COMPILER OPTIONS ... -o OBJECT -c SOURCE``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

WITH_VALUE = ("-o", "-MF", "-MT", "-MQ", "-I", "-isystem", "-D")
"""Options whose values say where files lie, or show in the preprocessed text."""


def relevant(options: list[str], source: str) -> list[str]:
    """Return the options that matter beside the preprocessed text."""
    kept: list[str] = []
    rest = iter(options)
    for option in rest:
        if option in WITH_VALUE:
            next(rest, "")
        elif option != source and not option.startswith(("-I", "-D", "-isystem", "-M")):
            kept.append(option)
    return kept


def preprocessed(command: list[str], with_lines: bool) -> bytes | None:
    """Return what the compiler will compile, or None if it cannot; writes the file of dependencies on the way."""
    words = list(command)
    at = words.index("-o")
    words[at : at + 2] = ["-o", "-"]
    words[words.index("-c")] = "-E"
    done = subprocess.run([*words, *([] if with_lines else ["-P"])], capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def main() -> int:
    """Compile, or copy what was compiled; return the compiler's exit status."""
    command, folder = sys.argv[1:], os.environ.get("PENSTOCK_TEST_OBJECTS", "")
    sources = [word for word in command if word.endswith(".cpp")]
    compiler = shutil.which(command[0])
    if not folder or compiler is None or len(sources) != 1 or not {"-c", "-o"} <= {*command}:
        return subprocess.run(command, check=False).returncode
    with_lines = any(word.startswith(("-g", "-fsanitize")) for word in command)
    text = preprocessed(command, with_lines)
    if text is None:
        return subprocess.run(command, check=False).returncode
    # CMake finds "c++", and pip's builds ask for "g++": links to one compiler.  Links to ccache are not.
    real = Path(compiler).resolve()
    state = real.stat()
    is_gnu = real.name.startswith(("g++", "x86_64", "aarch64")) and "g++" in real.name  # clang's target is in its name
    about = [str(real) if is_gnu else compiler, str(state.st_size), str(state.st_mtime_ns)]
    about += relevant(command[1:], sources[0])
    name = hashlib.sha256("\0".join(about).encode() + b"\0" + text).hexdigest()
    made, target = Path(folder, name), Path(command[command.index("-o") + 1])
    Path(folder).mkdir(parents=True, exist_ok=True)
    with Path(folder, f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who needs the same meanwhile waits for it
        if made.exists():
            shutil.copyfile(made, target)
            return 0
        status = subprocess.run(command, check=False).returncode
        if status == 0:
            shutil.copyfile(target, made.with_suffix(".new"))
            made.with_suffix(".new").rename(made)
        return status


if __name__ == "__main__":
    sys.exit(main())
