"""The first step of loading a version: a servable worker imports servable.py and returns the manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.checkpoint.gguf.file_name import split_names
from penstock.checkpoint.side_files import model_folder
from penstock.errors import InvalidFileError
from penstock.file_kinds import is_bundle, is_gguf
from penstock.servables.api.manifest import ModelManifest, ServableManifest, manifest_from_json, model_to_json
from penstock.servables.lifecycle.folder_scan import resolve_inside
from penstock.servables.process import worker_messages_pb2 as pb
from penstock.servables.process.servable_worker import ServableWorker, start_servable_worker

if TYPE_CHECKING:
    from penstock.processes.supervision import SupervisionPolicy

__all__ = ["OpenedVersion", "VersionSource", "read_script"]

MAX_SCRIPT_BYTES: Final = 4 << 20
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class VersionSource:
    """The files that a version is loaded from.

    ``name``: the servable.  ``file`` and ``text``: its servable.py.  ``version`` and ``folder``: the version.
    ``root``: the folder of servables, which must contain all files.
    """

    name: str
    file: Path
    text: bytes
    version: str
    folder: Path
    root: Path

    def start_message(self, model: ModelManifest | None = None, memory_limit_mib: int | None = None) -> pb.Start:
        """Return the message that makes a process run the Python stages, or a model."""
        message = pb.Start(servable=self.name, version=self.version, folder=str(self.folder), file=str(self.file))
        if model is None:
            message.source = self.text
        else:
            message.model = model_to_json(model)
            message.memory_limit_bytes = (memory_limit_mib or 0) * _MIB
        return message

    def check_file(self, name: str) -> Path:
        """Return the path of a file in the version's folder; raise InvalidFileError if it is missing or outside."""
        path = self.folder / name
        if not resolve_inside(self.root, path).is_file():
            raise InvalidFileError(f"{path} is not a file")
        return path

    def check_language_model(self, name: str) -> Path:
        """Return the path of a bundle, a GGUF file or a checkpoint folder.

        Raises InvalidFileError if a file of it lies outside.
        """
        path = self.folder / name
        if is_bundle(path):
            return self.check_file(name)
        if is_gguf(path):
            for part in split_names(path.name):
                self.check_file(str(Path(name).with_name(part)))
            return path
        if not resolve_inside(self.root, path).is_dir():
            raise InvalidFileError(
                f"{path} is neither a bundle (.psm), a GGUF file nor a checkpoint folder", param="path"
            )
        _check_links(self.root, path)
        if not (model_folder(path) / "config.json").exists():
            raise InvalidFileError(f"{path} is not a checkpoint folder: it has no config.json", param="path")
        return path


def _check_links(root: Path, folder: Path) -> None:
    """Raise InvalidFileError if anything in a folder, or in a folder that it links to, leads out of ``root``."""
    known: set[Path] = set()
    waiting = [folder]
    while waiting:
        path = resolve_inside(root, waiting.pop())
        if path not in known and path.is_dir():
            known.add(path)
            waiting += path.iterdir()


def read_script(file: Path) -> bytes:
    """Return the text of a servable.py; raise InvalidFileError if it cannot be read or is too large."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise InvalidFileError(f"{file}: {error.strerror or error}") from None
    if len(text) > MAX_SCRIPT_BYTES:
        raise InvalidFileError(f"{file} is larger than {MAX_SCRIPT_BYTES} bytes")
    return text


class OpenedVersion:
    """A process that has imported servable.py, and the manifest that it returned.

    The process becomes the first of the version's pool.
    """

    def __init__(
        self, source: VersionSource, supervision: SupervisionPolicy, process: ServableWorker, manifest: ServableManifest
    ) -> None:
        self.source, self.supervision, self.manifest = source, supervision, manifest
        self._process: ServableWorker | None = process

    @staticmethod
    async def open(source: VersionSource, supervision: SupervisionPolicy) -> OpenedVersion:
        """Import servable.py in a new process.  If this raises, the process has been stopped."""
        process = await start_servable_worker(source.start_message(), supervision.load_s)
        try:
            return OpenedVersion(source, supervision, process, manifest_from_json(process.manifest))
        except BaseException:
            await process.stop()
            raise

    def take_process(self) -> ServableWorker | None:
        """Return the process, which the caller must stop from now on; None if it was taken already."""
        process, self._process = self._process, None
        return process

    async def close(self) -> None:
        """Stop the process if it was not taken."""
        process = self.take_process()
        if process is not None:
            await process.stop()
