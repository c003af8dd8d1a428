"""The first step of loading a version: a process of its own imports servable.py and tells what it declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from penstock.errors import InvalidFileError
from penstock.servables.api.plan import ModelPlan, Plan, read_plan, write_model
from penstock.servables.lifecycle.versions import within
from penstock.servables.process import stages_pb2 as pb
from penstock.servables.process.stage_process import StageProcess, launch

if TYPE_CHECKING:
    from pathlib import Path

    from penstock.processes.supervision import SupervisionPolicy

__all__ = ["OpenedVersion", "Source", "read_script"]

MAX_SCRIPT_BYTES: Final = 4 << 20
_MIB: Final = 1 << 20


@dataclass(frozen=True)
class Source:
    """What a version is loaded from: the servable's name, servable.py and its text, the version, its folder and the
    folder of servables that all its files must lie in.
    """

    name: str
    file: Path
    text: bytes
    version: str
    folder: Path
    root: Path

    def start(self, model: ModelPlan | None = None, memory_limit_mib: int | None = None) -> pb.Start:
        """What a process is told: to run the Python stages, or a model."""
        found = pb.Start(servable=self.name, version=self.version, folder=str(self.folder), file=str(self.file))
        if model is None:
            found.source = self.text
        else:
            found.model = write_model(model)
            found.memory_limit_bytes = (memory_limit_mib or 0) * _MIB
        return found

    def path(self, name: str) -> Path:
        """A file of the version's folder; InvalidFileError when it is not there or a link leads elsewhere."""
        found = self.folder / name
        if not within(self.root, found).is_file():
            raise InvalidFileError(f"{found} is no file")
        return found

    def language_path(self, name: str) -> Path:
        """A bundle or a checkpoint's folder, none of whose files leads elsewhere; InvalidFileError."""
        if name.endswith(".psm"):
            return self.path(name)
        found = self.folder / name
        if not within(self.root, found).is_dir():
            raise InvalidFileError(f"{found} is neither a bundle (.psm) nor a checkpoint's folder")
        names = [one.name for one in found.iterdir()]
        for one in names:
            within(self.root, found / one)
        if "config.json" not in names:
            raise InvalidFileError(f"{found} is no checkpoint's folder: it has no config.json")
        return found


def read_script(file: Path) -> bytes:
    """The text of a servable.py; InvalidFileError."""
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_SCRIPT_BYTES + 1)
    except OSError as error:
        raise InvalidFileError(f"{file}: {error.strerror or error}") from None
    if len(text) > MAX_SCRIPT_BYTES:
        raise InvalidFileError(f"{file} has more than {MAX_SCRIPT_BYTES} bytes")
    return text


class OpenedVersion:
    """A process that has imported the file, which becomes the first of its version, and the plan that it told."""

    def __init__(self, source: Source, supervision: SupervisionPolicy, process: StageProcess, plan: Plan) -> None:
        self.source, self.supervision, self.plan = source, supervision, plan
        self._process: StageProcess | None = process

    @staticmethod
    async def begin(source: Source, supervision: SupervisionPolicy) -> OpenedVersion:
        """Import; raises what went wrong, and leaves nothing then."""
        process = await launch(source.start(), supervision.load_s)
        try:
            return OpenedVersion(source, supervision, process, read_plan(process.plan))
        except BaseException:
            await process.stop()
            raise

    def take(self) -> StageProcess | None:
        """The process, which is the caller's to end from now on."""
        process, self._process = self._process, None
        return process

    async def close(self) -> None:
        """End the process, if nobody took it."""
        process = self.take()
        if process is not None:
            await process.stop()
