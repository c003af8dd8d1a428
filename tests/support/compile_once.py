"""A compiler launcher for CMake: an object that a build of this run made before is copied.

Tests build the core many times, as releases, clones, examples and other levels, and most of the files are then compiled
from the same text with the same options.  The object's name in the folder ``PENSTOCK_TEST_OBJECTS`` is the hash of both
and of the compiler.  What is compiled with debug information or sanitizers, which keep paths and lines, is shared only
where these are the same too.  Anything but the compilation of one C++ file is passed on as it is.

Preprocessing takes about as long as everything else that is not compiling.  So what a source included is remembered as
well: with the same options, source and included files, found in the same places of another checkout, the object is
copied without preprocessing.  A header that is new and hides one of these is not noticed; no build of the tests adds
one to a folder that has been built.

CMake calls ``compile_once.py COMPILER OPTIONS ... -o OBJECT -c SOURCE``.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import sys
import time
from itertools import pairwise

# No pathlib, shutil or subprocess for a copy: their imports take twice as long as the rest of it.

WITH_VALUE = ("-o", "-MF", "-MT", "-MQ", "-I", "-isystem", "-D")
"""Options whose values say where files lie, or show in the preprocessed text."""


def relevant(options: list[str], source: str) -> list[str]:
    """Return the options that matter beside the preprocessed text."""
    # -Wno-unused-... adds no code: builds for given bundles have it, after others compiled the same without it.
    kept: list[str] = []
    rest = iter(options)
    for option in rest:
        if option in WITH_VALUE:
            next(rest, "")
        elif option != source and not option.startswith(("-I", "-D", "-isystem", "-M", "-Wno-unused")):
            kept.append(option)
    # Where -std stands differs between versions of CMake; builds by pip have their own.  The others keep their order:
    # of several -O the last counts.
    return sorted(kept, key=lambda option: not option.startswith("-std="))


def preprocessed(command: list[str], with_lines: bool) -> bytes | None:
    """Return what the compiler will compile, or None if it cannot; writes the file of dependencies on the way."""
    words = list(command)
    at = words.index("-o")
    words[at : at + 2] = ["-o", "-"]
    words[words.index("-c")] = "-E"
    status, text = run([*words, *([] if with_lines else ["-P"])], is_captured=True)
    return text if status == 0 else None


def run(command: list[str], is_captured: bool = False) -> tuple[int, bytes]:
    """Run the compiler; return its exit status and, if captured, its output."""
    import subprocess

    done = subprocess.run(command, capture_output=is_captured, check=False)
    return done.returncode, done.stdout or b""


def which(program: str) -> str | None:
    """Return the path of a program."""
    folders = [""] if os.sep in program else os.get_exec_path()
    paths = [os.path.join(folder, program) for folder in folders]
    return next((path for path in paths if os.access(path, os.X_OK) and os.path.isfile(path)), None)


def copy(source: str, target: str) -> None:
    """Copy a file."""
    with open(target, "wb") as file:
        file.write(content_of(source))


def content_of(path: str) -> bytes:
    """Return the bytes of a file."""
    with open(path, "rb") as file:
        return file.read()


def write(path: str, text: str) -> None:
    """Write a file whole: other processes see the old one or the new one."""
    new = f"{path}.{os.getpid()}.new"
    with open(new, "w", encoding="utf-8") as file:
        file.write(text)
    os.replace(new, path)


def digest(*parts: object) -> str:
    """Return the hash of some values."""
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()


def include_folders(command: list[str]) -> list[str]:
    """Return the folders of ``-I``, in order."""
    return [value if word == "-I" else word[2:] for word, value in pairwise([*command, ""]) if word.startswith("-I")]


class Includes:
    """What a source included when it was compiled with some options, by places that other checkouts have too."""

    def __init__(self, folder: str, command: list[str], source: str, about: list[str]) -> None:
        self._command, self._source = command, source
        self._folders = [os.path.realpath(each) for each in include_folders(command)]
        defines = [word for word in command if word.startswith("-D")]
        self._began = time.time_ns()
        text = hashlib.sha256(content_of(source)).hexdigest()
        name = digest(*about, *defines, len(self._folders), os.path.basename(source), text)
        self._file = os.path.join(folder, f"{name}.includes")

    def place(self, path: str) -> str:
        """Return a path, from the folder of ``-I`` or of the source where it lies in one."""
        full = os.path.realpath(path)
        for number, folder in enumerate([*self._folders, os.path.dirname(os.path.realpath(self._source))]):
            if full.startswith(folder + os.sep):
                return f"{number}:{full[len(folder) + 1 :]}"
        return f":{full}"

    def path(self, place: str) -> str:
        """Return the path of a place for this compilation."""
        number, _, rest = place.partition(":")
        folders = [*self._folders, os.path.dirname(os.path.realpath(self._source))]
        return os.path.join(folders[int(number)], rest) if number else rest

    @staticmethod
    def state(path: str) -> str:
        """Return what tells a version of an included file from others: of the system's files, size and time."""
        stat = os.stat(path)
        if path.startswith("/usr/"):
            return f"{stat.st_size} {stat.st_mtime_ns}"
        return hashlib.sha256(content_of(path)).hexdigest()

    def find(self) -> str | None:
        """Return the name of the object, and write the file of dependencies, if all that was included is the same."""
        try:
            name, *lines = content_of(self._file).decode().splitlines()
            rows = [line.partition("\t") for line in lines]
            paths = [self.path(place) for place, _, _ in rows]
            if [self.state(path) for path in paths] != [state for _, _, state in rows]:
                return None
        except (OSError, ValueError, IndexError):
            return None
        if "-MF" in self._command:
            target = self._command[self._command.index("-MT") + 1] if "-MT" in self._command else "object"
            words = " \\\n ".join(path.replace(" ", "\\ ") for path in [self._source, *paths])
            write(self._command[self._command.index("-MF") + 1], f"{target}: {words}\n")
        return name

    def keep(self, name: str) -> None:
        """Remember what the file of dependencies says, unless it cannot be read or a file changed meanwhile."""
        try:
            text = content_of(self._command[self._command.index("-MF") + 1]).decode()
            words = text.replace("\\\n", " ").partition(": ")[2].replace("\\ ", "\0").split()
            paths = [os.path.realpath(word.replace("\0", " ")) for word in words]
            if any(max(stat.st_mtime_ns, stat.st_ctime_ns) >= self._began for stat in map(os.stat, paths)):
                return
            paths = [path for path in paths if path != os.path.realpath(self._source)]
            lines = [f"{self.place(path)}\t{self.state(path)}" for path in dict.fromkeys(paths)]
        except (OSError, ValueError):
            return
        write(self._file, "\n".join([name, *lines]) + "\n")


def main() -> int:
    """Compile, or copy what was compiled; return the compiler's exit status."""
    command, folder = sys.argv[1:], os.environ.get("PENSTOCK_TEST_OBJECTS", "")
    sources = [word for word in command if word.endswith(".cpp")]
    compiler = which(command[0])
    if not folder or compiler is None or len(sources) != 1 or not {"-c", "-o"} <= {*command}:
        return run(command)[0]
    # CMake finds "c++", and pip's builds ask for "g++": links to one compiler.  Links to ccache are not.
    real = os.path.realpath(compiler)
    file, compiler_stat = os.path.basename(real), os.stat(real)
    is_gnu = file.startswith(("g++", "x86_64", "aarch64")) and "g++" in file  # clang's target is in its name
    about = [real if is_gnu else compiler, str(compiler_stat.st_size), str(compiler_stat.st_mtime_ns)]
    about += relevant(command[1:], sources[0])
    with_lines = any(word.startswith(("-g", "-fsanitize")) for word in command)
    os.makedirs(folder, exist_ok=True)
    includes = None if with_lines or not os.path.isfile(sources[0]) else Includes(folder, command, sources[0], about)
    target = command[command.index("-o") + 1]
    if includes and (name := includes.find()) and os.path.exists(made := os.path.join(folder, name)):
        copy(made, target)
        return 0
    text = preprocessed(command, with_lines)
    if text is None:
        return run(command)[0]
    name = hashlib.sha256("\0".join(about).encode() + b"\0" + text).hexdigest()
    status = compile_or_copy(command, os.path.join(folder, name), target)
    if includes and status == 0:
        includes.keep(name)
    return status


def compile_or_copy(command: list[str], made: str, target: str) -> int:
    """Copy the object if it was made, else make it and keep it."""
    with open(f"{made}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # who needs the same meanwhile waits for it
        if os.path.exists(made):
            copy(made, target)
            return 0
        status = run(command)[0]
        if status == 0:
            copy(target, f"{made}.new")
            os.replace(f"{made}.new", made)
        return status


if __name__ == "__main__":
    sys.exit(main())
