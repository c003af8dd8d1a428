"""The files of requests of ``penstock batch``: local ones, and copies of those in an object store."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, Final

from penstock.errors import FileAccessError, InvalidArgumentError, UnavailableError
from penstock.extras import install_command

__all__ = ["PROTOCOLS", "local_sources"]

PROTOCOLS: Final = {"s3": "s3"}
"""The protocols that are read, with the extra that each one needs."""


@contextmanager
def local_sources(sources: Sequence[str], output: str) -> Iterator[list[str]]:
    """Yield the paths of the sources; an address as s3://bucket/name.jsonl is copied for as long as the context lasts.

    An address that ends with "/" is a folder, whose ``*.jsonl`` files are copied into one; so are the files that a
    pattern as s3://bucket/*.jsonl matches.  Raises InvalidArgumentError
    for other protocols and for an ``output`` that is not local, UnavailableError without the library of the protocol,
    and FileAccessError for a file that cannot be read.
    """
    if "://" in output:
        raise InvalidArgumentError(f"output: expected a local file or folder, got {output!r:.200}", param="output")
    with tempfile.TemporaryDirectory(prefix="penstock-batch-") as folder:
        paths = []
        for number, source in enumerate(sources):
            paths.append(_copied(source, Path(folder, str(number))) if "://" in source else source)
        yield paths


def _copied(url: str, folder: Path) -> str:
    """Copy what an address names into a new folder, and return the path of the copy."""
    files, path = _file_system(url), url.partition("://")[2]
    folder.mkdir()
    pattern = f"{path}*.jsonl" if path.endswith("/") else path
    is_folder = "*" in pattern or "?" in pattern
    try:
        names = [path]
        if is_folder:
            names = sorted(name for name in files.glob(pattern) if name.endswith(".jsonl"))
            _refuse_twins(url, names)
        for name in names:
            files.get_file(name, str(folder / PurePosixPath(name).name))
    except InvalidArgumentError:
        raise
    except Exception as error:  # the libraries of the protocols raise errors of their own
        reason = str(error) or type(error).__name__
        raise FileAccessError(f"{url}: cannot be read: {reason:.500}") from error
    if not names:
        expected = "a folder with *.jsonl files" if path.endswith("/") else "a pattern of *.jsonl files"
        raise InvalidArgumentError(f"{url}: expected {expected}, got none")
    return str(folder if is_folder else folder / PurePosixPath(path).name)


def _refuse_twins(url: str, names: Sequence[str]) -> None:
    """Refuse files of one name in several folders: their results go to one folder."""
    files: set[str] = set()
    for name in names:
        file = PurePosixPath(name).name
        if file in files:
            raise InvalidArgumentError(f"{url}: expected files of different names, got {file!r:.200} twice")
        files.add(file)


def _file_system(url: str) -> Any:
    """Return the file system of fsspec for an address."""
    import fsspec

    protocol = url.partition("://")[0]
    if protocol not in PROTOCOLS:
        known = ", ".join(f"{name}://" for name in PROTOCOLS)
        raise InvalidArgumentError(
            f"input: expected a path or an address with {known}, got {url!r:.200}", param="input"
        )
    try:
        return fsspec.filesystem(protocol)
    except ImportError:
        raise UnavailableError(
            f"{url}: reading {protocol}:// needs a library that is not installed. Run "
            f"`{install_command(PROTOCOLS[protocol])}`."
        ) from None
